"""The command that makes a page to look at: explore."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from .app import app, progress_bars, show
from .flags import Adapter, Device, DeviceMap, Dtype, Revision


@app.command(epilog="Example: focus-hf explore --adapter my-adapter --text notes.txt --pairs 0.15 --out explorer.html")
def explore(
    adapter: Adapter,
    text: Annotated[list[Path] | None, typer.Option(help="Text files.", exists=True, dir_okay=False)] = None,
    pairs: Annotated[float | None, typer.Option(help="Share of the pairs to attend to (routing by cells).")] = None,
    top_k: Annotated[int | None, typer.Option(help="Groups per token (shared routing).")] = None,
    model: Annotated[
        str | None, typer.Option("--model", "--base", help="Base model, if not the one that the adapter names.")
    ] = None,
    revision: Revision = None,
    device: Device = "cpu",
    device_map: DeviceMap = None,
    dtype: Dtype = "auto",
    max_tokens: Annotated[int, typer.Option(help="Tokens shown.", min=1)] = 1500,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens read at a time; as many as the model has positions by default.", min=2)
    ] = None,
    out: Annotated[Path, typer.Option(help="The page.", dir_okay=False)] = Path("explorer.html"),
    space: Annotated[Path | None, typer.Option(help="Folder that becomes a static Space.", file_okay=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print facts about the page as JSON.")] = False,
) -> None:
    """Write a page that shows what each head reads far away, token by token: one HTML file, nothing else needed."""
    from ..adapter.placement import check_placement
    from ..explore.command import run_explore
    from ..hub import load_adapted

    check_placement(device, device_map, dtype)
    with progress_bars() as progress:
        facts = run_explore(
            adapter,
            [str(path) for path in text or ()],
            load=partial(
                load_adapted, base=model, revision=revision, device=device, device_map=device_map, dtype=dtype
            ),
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
