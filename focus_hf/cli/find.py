"""Commands that look: search, info."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ..escape import one_line
from ..output import screen
from .app import app, show
from .flags import AsJson, Revision

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
