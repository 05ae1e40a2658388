"""What a command delivers: something to look at, JSON, or both."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console, RenderableType

from .files import write_atomically


def deliver(document: str, json_out: str | None, shown: Iterable[RenderableType]) -> None:
    """Show something and write JSON into a file; or print JSON, and then nothing else goes to standard output.

    Args:
        document: JSON.
        json_out: file for it, ``"-"`` for standard output, ``None`` for nowhere.
        shown: tables and text for people.
    """
    if json_out == "-":
        sys.stdout.write(document)
        return
    screen = Console()
    for part in shown:
        screen.print(part)
    if json_out is not None:
        write_atomically(Path(json_out), document.encode())
