"""What all commands share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress
from typer.core import TyperGroup

from ..progress import progress_display, quiet_libraries

#: Commands under their headings, in the order in which somebody meets them.
HEADINGS = {
    "Start here": ("demo",),
    "Make an adapter": ("train", "fit", "eval", "groups", "explore", "compare"),
    "Share it": ("card", "push", "pull"),
    "Find one, and trust it": ("search", "info", "verify"),
    "This machine": ("hub", "bench"),
}


class _Commands(TyperGroup):
    """The list of commands under `HEADINGS`, whichever module was imported first."""

    def list_commands(self, ctx: Any) -> list[str]:
        order = [name for names in HEADINGS.values() for name in names]
        return sorted(super().list_commands(ctx), key=lambda name: order.index(name) if name in order else len(order))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            heading = next((title for title, names in HEADINGS.items() if cmd_name in names), None)
            command.rich_help_panel = heading  # type: ignore[attr-defined]
        return command


app = typer.Typer(
    name="focus-hf",
    cls=_Commands,
    help="Focus adapters: sparse long-range attention for Hugging Face models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)


def numbers(option: str, text: str) -> list[int]:
    """Whole numbers with commas between them."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} takes whole numbers with commas between them, got {text!r}.") from None


def shares(option: str, text: str) -> list[float]:
    """Shares of pairs with commas between them."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 < share <= 1 for share in found):
        raise ValueError(f"{option} takes shares above 0 and at most 1, with commas between them, got {text!r}.")
    return found


def show(values: dict[str, Any], text: str, as_json: bool) -> None:
    typer.echo(json.dumps(values) if as_json else text)


def stderr() -> Console:
    return Console(stderr=True)


def is_main_process() -> bool:
    """Under a launcher of several processes, only the first one speaks."""
    import os

    return os.environ.get("RANK", "0") == "0"


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Bars (or lines) on standard error; libraries' own bars and chatter are off."""
    quiet_libraries()
    with progress_display(Console(stderr=True, quiet=not is_main_process())) as progress:
        yield progress
