"""Commands that look: search, info."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .app import app, show


@app.command(epilog="Example: focus-hf search --base org/llama --group punctuation --sort perplexity")
def search(
    text: Annotated[str | None, typer.Argument(help="Part of the name.")] = None,
    base: Annotated[str | None, typer.Option(help="Hub id of the base model.")] = None,
    domain: Annotated[str | None, typer.Option(help="Part of a tag, a data set's name or the name.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Tag that must be there; may be repeated.")] = None,
    author: Annotated[str | None, typer.Option(help="User or organisation.")] = None,
    num_groups: Annotated[int | None, typer.Option(help="Groups per layer (K).", min=1)] = None,
    top_k: Annotated[int | None, typer.Option(help="Groups per token (k).", min=1)] = None,
    group: Annotated[str | None, typer.Option(help="With a group about this: punctuation, verb, PROPN ...")] = None,
    sort: Annotated[str, typer.Option(help="downloads, likes, date, perplexity.")] = "downloads",
    limit: Annotated[int, typer.Option(help="Results, at most.", min=1)] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Find adapters on the Hub."""
    from ..hub import search as search_hub

    found = search_hub(
        base,
        text=text,
        domain=domain,
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
    table = Table("adapter", "base model", "K", "k", "perplexity", "groups", "downloads", "likes", "updated", box=None)
    for adapter in found:
        change = adapter.perplexity_change
        cells = [
            adapter.repo_id,
            adapter.base_model,
            adapter.num_groups,
            adapter.top_k,
            None if change is None else f"{change:+.2f} %",
            ", ".join(adapter.groups[:4]),
            adapter.downloads,
            adapter.likes,
            adapter.updated,
        ]
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in cells))
    Console().print(table)


@app.command(epilog="Example: focus-hf info org/llama-focus")
def info(
    adapter: Annotated[str | None, typer.Argument(help="An adapter: a folder or a Hub id.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of the adapter on the Hub.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """An adapter in one screen, without downloading its weights; or this machine: versions, devices, kernels."""
    if adapter is not None:
        from ..hub.info import adapter_info

        facts = adapter_info(adapter, revision=revision)
        if as_json:
            typer.echo(json.dumps(facts))
        else:
            Console().print(_table(facts))
        return
    from ..machine import environment

    facts = environment()
    lines = [f"{name} {version}" for name, version in facts["packages"].items()]
    lines += [f"{d['device']}: {d['name']}, uses {d['kernel']}" for d in facts["devices"]]
    lines += [f"kernel {name}: {state}" for name, state in facts["kernels"].items()]
    show(facts, "\n".join([f"Python {facts['python']}, {facts['platform']}", *lines]), as_json)


def _table(facts: dict[str, Any]) -> Table:
    table = Table(show_header=False, box=None)
    for name, value in facts.items():
        if value is None or value == {}:
            continue
        table.add_row(Text(name.replace("_", " ")), Text(_line(name, value)))
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
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)
