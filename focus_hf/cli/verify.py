"""The command about trust: verify."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from ..output import screen
from .app import app, numbers, progress_bars
from .flags import AsJson, BaseModel, Device, DeviceMap, Dtype, Revision

_STYLES = {"holds": "green", "differs": "bold red", "not checked": "yellow"}


@app.command(epilog="Example: focus-hf verify org/llama-focus --text held-out.txt")
def verify(
    adapter: Annotated[str, typer.Argument(help="The adapter: a folder or a Hub id.")],
    text: Annotated[
        list[Path] | None, typer.Option(help="Text file that the card names; may be repeated.", exists=True)
    ] = None,
    treebank: Annotated[
        list[Path] | None, typer.Option(help="Treebank of the card's group report (.conllu).", exists=True)
    ] = None,
    model: BaseModel = None,
    revision: Revision = None,
    device: Device = "cpu",
    device_map: DeviceMap = None,
    dtype: Dtype = "auto",
    files_only: Annotated[bool, typer.Option("--files-only", help="Check what needs no model.")] = False,
    seq_len: Annotated[
        str | None, typer.Option(help="Measure perplexity at these lengths only, with commas; long ones take long.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a card's claims again on this machine; exit code 1 if one does not hold."""
    from ..adapter.placement import check_placement
    from ..card.read import CARD
    from ..hub import adapter_folder
    from ..machine import require
    from ..verify import verify as verify_adapter
    from ..verify.claims import all_hold, verdict_of

    check_placement(device, device_map, dtype)
    lengths = None if seq_len is None else numbers("--seq-len", seq_len)
    if treebank:
        require("conllu", "sklearn")
    folder = adapter_folder(adapter, revision=revision)
    with progress_bars() as progress:
        bar = progress.add_task("verifying", total=None, visible=False)
        claims = verify_adapter(
            str(folder),
            texts=[str(path) for path in text or ()],
            treebanks=[str(path) for path in treebank or ()],
            base=model,
            device=device,
            device_map=device_map,
            dtype=dtype,
            files_only=files_only,
            lengths=lengths,
            tick=lambda done: progress.update(bar, advance=1, description=done, visible=True),
        )
    if as_json:
        typer.echo(json.dumps({"adapter": adapter, "holds": all_hold(claims), "claims": [asdict(c) for c in claims]}))
    else:
        table = Table(box=None)
        for column in ("claim", "claimed", "measured", "verdict", ""):
            table.add_column(column, overflow="fold")
        for claim in claims:
            verdict = Text(claim.verdict, style=_STYLES[claim.verdict])
            table.add_row(Text(claim.what), Text(claim.claimed), Text(claim.measured or ""), verdict, Text(claim.note))
        screen().print(table)
        typer.echo(verdict_of(claims, has_card=(folder / CARD).is_file()))
    raise typer.Exit(0 if all_hold(claims) else 1)
