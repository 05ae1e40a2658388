"""Commands that look: search, info, groups, explore."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ..escape import one_line
from ..output import screen
from .app import app, progress_bars, show
from .flags import Adapter, AsJson, JsonFile, Placement, Revision, flags_of, placed

if TYPE_CHECKING:
    from ..hub.search import Found


@app.command(epilog="Example: focus-hf search --base org/llama --group punctuation --sort perplexity")
def search(
    text: Annotated[str | None, typer.Argument(help="Part of the name.")] = None,
    base: Annotated[str | None, typer.Option(help="Hub id of the base model.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Tag that must be there; may be repeated.")] = None,
    author: Annotated[str | None, typer.Option(help="User or organisation.")] = None,
    num_groups: Annotated[int | None, typer.Option(help="Groups per layer (K).", min=1)] = None,
    top_k: Annotated[int | None, typer.Option(help="Groups per token (k).", min=1)] = None,
    group: Annotated[str | None, typer.Option(help="With a group about this: punctuation, verbs ...")] = None,
    sort: Annotated[str, typer.Option(help="downloads, likes, date, perplexity.")] = "downloads",
    limit: Annotated[int, typer.Option(help="Results, at most.", min=1)] = 20,
    as_json: AsJson = False,
) -> None:
    """Find adapters on the Hub."""
    from ..hub import search as search_hub

    found = search_hub(
        base,
        text=text,
        tags=tag or (),
        author=author,
        num_groups=num_groups,
        top_k=top_k,
        group=group,
        sort=sort,
        limit=limit,
    )
    if as_json:
        typer.echo(json.dumps([adapter.to_dict() for adapter in found]))
        return
    if not found:
        typer.echo("No Focus adapter matches.")
        return
    out = screen()
    for adapter in found:  # names stand whole on a line, however narrow the terminal is: they are copied
        out.print(Text(one_line(adapter.repo_id), style="bold"), soft_wrap=True)
        for line in _described(adapter):
            out.print(Text(f"  {one_line(line)}"), soft_wrap=True)


def _described(adapter: Found) -> Iterator[str]:
    """What stands below an adapter's name in the list of a search."""
    facts = [
        f"base {adapter.base_model}" if adapter.base_model else "",
        f"K={adapter.num_groups}" if adapter.num_groups else "",
        f"k={adapter.top_k}" if adapter.top_k else "",
        f"{adapter.parameters:,} parameters" if adapter.parameters else "",
    ]
    yield ", ".join(fact for fact in facts if fact) or "its card says nothing of it"
    if adapter.losses and adapter.pairs and adapter.context_length:
        first = list(adapter.losses.items())[:4]
        losses = ", ".join(f"{text.removesuffix('.txt')} {loss:+.1f} %" for text, loss in first)
        yield f"loses with {100 * adapter.pairs:.0f} % of the pairs, {adapter.context_length:,} tokens: {losses}"
    if adapter.groups:
        more = f" and {len(adapter.groups) - 4} more" if len(adapter.groups) > 4 else ""
        yield f"groups: {', '.join(adapter.groups[:4])}{more}"
    updated = f", updated {adapter.updated}" if adapter.updated else ""
    yield f"{adapter.downloads:,} downloads, {adapter.likes:,} likes{updated}"


@app.command(epilog="Example: focus-hf info org/llama-focus")
def info(
    adapter: Annotated[str | None, typer.Argument(help="An adapter: a folder or a Hub id.")] = None,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """An adapter in one screen, without downloading its weights; or this machine: versions, devices, kernels."""
    if adapter is not None:
        from ..hub.pull import adapter_info

        facts = adapter_info(adapter, revision=revision)
        if as_json:
            typer.echo(json.dumps(facts))
        else:
            screen().print(_table(facts))
        return
    from ..machine import environment

    facts = environment()
    lines = [f"{name} {version}" for name, version in facts["packages"].items()]
    lines += [f"{d['device']}: {d['name']}, uses {d['kernel']}" for d in facts["devices"]]
    lines += [f"kernel {name}: {state}" for name, state in facts["kernels"].items()]
    lines += [f"{name}: {state}" for name, state in facts["torch_flash"].items()]
    show(facts, "\n".join([f"Python {facts['python']}, {facts['platform']}", *lines]), as_json)


#: Characters of a fact: names and hashes are shorter.
_LONGEST_LINE = 1_000


def _table(facts: dict[str, Any]) -> Table:
    table = Table(show_header=False, box=None)
    table.add_column()
    table.add_column(overflow="fold")  # names and hashes are copied: nothing is cut
    for name, value in facts.items():
        if value is None or value == {}:
            continue
        lines = (one_line(line, limit=_LONGEST_LINE) for line in _line(name, value).split("\n"))  # a stranger's words
        table.add_row(Text(name.replace("_", " ")), Text("\n".join(lines)))
    return table


def _line(name: str, value: Any) -> str:
    if name == "quality":
        rows = []
        for row in value:
            change = f" ({100 * (row['focus'] / row['dense'] - 1):+.2f} %)" if row["dense"] and row["focus"] else ""
            figures = " to ".join("?" if row[key] is None else f"{row[key]:.2f}" for key in ("dense", "focus"))
            rows.append(f"{row['data']}, {row['context_length']} tokens: perplexity {figures}{change}")
        return "\n".join(rows)
    if name == "largest_group":
        return f"{100 * value:.1f} %"
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)


@app.command(epilog="Example: focus-hf groups --adapter my-adapter --treebank en_ewt-ud-dev.conllu --plots plots")
@flags_of(Placement)
def groups(
    given: dict[str, Any],
    adapter: Adapter,
    text: Annotated[list[Path] | None, typer.Option(help="Text files.", exists=True)] = None,
    treebank: Annotated[
        list[Path] | None,
        typer.Option(help="Gold labels: a treebank (.conllu), or Python files (.py).", exists=True),
    ] = None,
    against: Annotated[str | None, typer.Option(help="Another adapter of the same base: which groups match?")] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens read at a time.", min=2)] = 1024,
    heads: Annotated[
        int | None,
        typer.Option(help="Heads to describe, those that attend far most; each costs a run.", min=1),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of examples and random groups.")] = 0,
    json_out: JsonFile = None,
    markdown: Annotated[str | None, typer.Option(help="Write Markdown: a file, or - for the screen.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for pictures.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Put the report into the adapter's folder.")] = False,
) -> None:
    """Say what each group of tokens means, with evidence, over any text or against a gold treebank."""
    from ..hub import load_adapted
    from ..interpret.command import run_groups, run_match

    placement = placed(given)
    if against is not None:
        if treebank or markdown or plots or write:
            raise ValueError("--against compares two adapters on a --text; it takes --json and no other output.")
        files = [str(path) for path in text or ()]
        placement.pop("revision", None)  # of two adapters
        load = partial(load_adapted, **placement)
        run_match(adapter, against, files, load=load, window=seq_len, json_out=json_out)
        return
    with progress_bars() as progress:
        run_groups(
            adapter,
            load=partial(load_adapted, **placement),
            progress=progress,
            texts=[str(path) for path in text or ()],
            treebanks=[str(path) for path in treebank or ()],
            window=seq_len,
            heads=heads,
            seed=seed,
            json_out=json_out,
            markdown=markdown,
            plots=plots,
            write=write,
        )


@app.command(epilog="Example: focus-hf explore --adapter my-adapter --text notes.txt --pairs 0.15 --out explorer.html")
@flags_of(Placement)
def explore(
    given: dict[str, Any],
    adapter: Adapter,
    text: Annotated[list[Path] | None, typer.Option(help="Text files.", exists=True, dir_okay=False)] = None,
    pairs: Annotated[float | None, typer.Option(help="Share of the pairs to attend to (routing by cells).")] = None,
    top_k: Annotated[int | None, typer.Option(help="Groups per token (shared routing).")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens shown.", min=1)] = 1500,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens read at a time; as many as the model has positions by default.", min=2)
    ] = None,
    out: Annotated[Path, typer.Option(help="The page.", dir_okay=False)] = Path("explorer.html"),
    space: Annotated[Path | None, typer.Option(help="Folder that becomes a static Space.", file_okay=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print facts about the page as JSON.")] = False,
) -> None:
    """Write a page that shows what each head reads far away, token by token: one HTML file, nothing else needed."""
    from ..explore.command import run_explore
    from ..hub import load_adapted

    load = partial(load_adapted, **placed(given))
    with progress_bars() as progress:
        facts = run_explore(
            adapter,
            [str(path) for path in text or ()],
            load=load,
            progress=progress,
            pairs=pairs,
            top_k=top_k,
            max_tokens=max_tokens,
            window=seq_len,
            out=out,
            space=space,
        )
    show(facts, _told(facts), as_json)


def _told(facts: dict[str, Any]) -> str:
    cut = f", {facts['left_out']:,} more left out" if facts["left_out"] else ""
    lines = [
        f"Wrote {facts['page']}: {facts['tokens']:,} tokens{cut}, {facts['bytes'] / 1e6:.2f} MB.",
        f"Open it in a browser. It opens at {facts['first']}.",
    ]
    if facts["space"] is not None:
        lines.append(f"{facts['space']} is a static Space: hf upload ORG/NAME {facts['space']} . --repo-type space")
    return "\n".join(lines)
