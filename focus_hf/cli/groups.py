"""The command about meaning: groups."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from .app import app, progress_bars
from .flags import Adapter, BaseModel, Device, DeviceMap, Dtype, JsonFile, Revision


@app.command(epilog="Example: focus-hf groups --adapter my-adapter --treebank en_ewt-ud-dev.conllu --plots plots")
def groups(
    adapter: Adapter,
    text: Annotated[list[Path] | None, typer.Option(help="Text files.", exists=True)] = None,
    treebank: Annotated[
        list[Path] | None,
        typer.Option(help="Gold labels: a treebank (.conllu), or Python files (.py).", exists=True),
    ] = None,
    against: Annotated[str | None, typer.Option(help="Another adapter of the same base: which groups match?")] = None,
    model: BaseModel = None,
    revision: Revision = None,
    device: Device = "cpu",
    device_map: DeviceMap = None,
    dtype: Dtype = "auto",
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
    from ..adapter.placement import check_placement
    from ..hub import load_adapted
    from ..interpret.command import run_groups, run_match

    check_placement(device, device_map, dtype)
    load = partial(load_adapted, base=model, device=device, device_map=device_map, dtype=dtype)
    if against is not None:
        if treebank or markdown or plots or write:
            raise ValueError("--against compares two adapters on a --text; it takes --json and no other output.")
        files = [str(path) for path in text or ()]
        run_match(adapter, against, files, load=load, window=seq_len, json_out=json_out)
        return
    with progress_bars() as progress:
        run_groups(
            adapter,
            load=partial(load, revision=revision),
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
