"""Flags that several commands have, each described in one place."""

from __future__ import annotations

from typing import Annotated

import typer

Adapter = Annotated[str, typer.Option(help="The adapter: a folder or a Hub id.")]
BaseModel = Annotated[str | None, typer.Option(help="Base model, if not the one that the adapter names.")]
Revision = Annotated[str | None, typer.Option(help="Revision of the adapter on the Hub.")]
Device = Annotated[str, typer.Option(help="Where: cpu, cuda, cuda:1 ...")]
DeviceMap = Annotated[
    str | None,
    typer.Option(help="Instead of --device: auto, balanced, ... spread the model over all devices (accelerate)."),
]
Dtype = Annotated[str, typer.Option(help="Of the model's weights: auto (its own), float32, bfloat16, float16.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
JsonFile = Annotated[str | None, typer.Option("--json", help="Write JSON: a file, or - for the screen.")]

#: Of a card that is made.
NamedBase = Annotated[str | None, typer.Option(help="Hub id of the base model, if it was a folder.")]
License = Annotated[str | None, typer.Option(help="Licence of the adapter; the base model's by default.")]
