"""What a command delivers: something to look at, JSON, or both."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console, RenderableType

from .files import write_atomically

#: Columns of what is not a terminal: a log, or another program.
WIDE = 200


def screen() -> Console:
    """Standard output, wide where no terminal says how wide it is, so that tables in logs are not broken up."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=WIDE)


def say(console: Console, text: str, style: str | None = None) -> None:
    """Show text as it is: nothing in it is markup, and no line is broken, so that it can be copied."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


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
    out = screen()
    for part in shown:
        out.print(part)
    if json_out is not None:
        write_atomically(Path(json_out), document.encode())
