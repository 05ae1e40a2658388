"""The command line itself: what all commands share, and how their mistakes are told."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import typer
from rich.console import Console
from rich.progress import Progress
from typer.core import TyperGroup

from ..progress import progress_display

#: Commands under their headings, in the order in which somebody meets them.
HEADINGS = {
    "Start here": ("demo",),
    "Make an adapter": ("train", "eval", "groups", "explore", "compare"),
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


#: Packages that a command may find missing, and the extra that brings them.
_EXTRAS = {
    "accelerate": "train",
    "conllu": "interpret",
    "datasets": "train",
    "dulwich": "hub",
    "markdown_it": "hub",
    "lm_eval": "eval",
    "matplotlib": "viz",
    "scipy": "interpret",
    "sklearn": "interpret",
    "starlette": "hub",
    "uvicorn": "hub",
}

#: Commands whose --json takes a file; without one they print.
_JSON_FILES = ("bench", "compare", "eval", "groups")


def _json_to_screen(arguments: list[str]) -> list[str]:
    """Give ``--json`` its value ``-`` where it stands alone."""
    if not arguments or arguments[0] not in _JSON_FILES:
        return arguments
    result = []
    for position, argument in enumerate(arguments):
        result.append(argument)
        following = arguments[position + 1 : position + 2]
        if argument == "--json" and (not following or following[0].startswith("--")):
            result.append("-")
    return result


def show(values: dict[str, Any], text: str, as_json: bool) -> None:
    typer.echo(json.dumps(values) if as_json else text)


def load_commands(arguments: list[str]) -> None:
    """Import the commands whose flags come from the training recipe, unless another one is called: they need torch."""
    names = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    if not arguments or arguments[0] not in names:
        from . import quality  # noqa: F401


def _fail(message: str) -> None:
    stderr().print(f"focus-hf: {' '.join(message.split())}", markup=False, highlight=False, soft_wrap=True)
    sys.exit(1)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """What is meant for the user, without the line of source that it comes from."""
    text = f"Note: {message}" if issubclass(category, UserWarning) else f"{category.__name__}: {message}"
    stderr().print(text, markup=False, highlight=False, soft_wrap=True)


def stderr() -> Console:
    return Console(stderr=True)


def is_main_process() -> bool:
    """Under a launcher of several processes, only the first one speaks."""
    import os

    return os.environ.get("RANK", "0") == "0"


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Bars (or lines) on standard error; libraries' own bars and chatter are off."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)  # PEFT's own
    with progress_display(Console(stderr=True, quiet=not is_main_process())) as progress:
        yield progress


def main() -> None:
    """Entry point. Exit code 0; 1 for what went wrong, told in one line; 2 for a wrong command line."""
    arguments = sys.argv[1:]
    warnings.showwarning = _show_warning
    try:
        load_commands(arguments)
        app(_json_to_screen(arguments))
    except (ValueError, RuntimeError, OSError) as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        _fail(f"This needs {package}: pip install 'focus-hf[{_EXTRAS[package]}]'")
    except KeyboardInterrupt:
        sys.exit(130)
