"""What all commands share: where they are listed, what they print, and how a user's mistakes are told."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import typer
from rich.console import Console
from rich.progress import Progress

from ..escape import one_line
from ..output import say
from ..progress import progress_display, quiet_libraries

#: Commands under their headings, in the order in which somebody meets them.
HEADINGS = {
    "Start here": ("demo",),
    "Make an adapter": ("train", "fit", "eval", "groups", "explore", "compare"),
    "Share it": ("card", "push", "pull"),
    "Find one, and trust it": ("search", "info", "verify"),
    "This machine": ("hub", "bench"),
}

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

#: Characters of a line that may quote a stranger: several sentences.
LONGEST_LINE = 3_000

app = typer.Typer(
    name="focus-hf",
    help="Focus adapters: sparse long-range attention for Hugging Face models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)


def in_order() -> None:
    """List the commands under `HEADINGS`, whichever module was imported first."""
    places = {name: title for title, names in HEADINGS.items() for name in names}
    order = list(places)
    for command in app.registered_commands:
        command.name = str(command.name or getattr(command.callback, "__name__", ""))
        command.rich_help_panel = places[command.name]
    app.registered_commands.sort(key=lambda command: order.index(str(command.name)))


def numbers(option: str, text: str | None) -> list[int]:
    """Whole numbers with commas between them; none where the option is not given."""
    try:
        return [] if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} takes whole numbers with commas between them, got {text!r}.") from None


def shares(option: str, text: str | None) -> list[float]:
    """Shares of pairs with commas between them; none where the option is not given."""
    try:
        found = [] if text is None else [float(part) for part in text.split(",")]
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
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Bars (or lines) on standard error; libraries' own bars and chatter are off."""
    quiet_libraries()
    with progress_display(Console(stderr=True, quiet=not is_main_process())) as progress:
        yield progress


def main() -> None:
    """Entry point. Exit code 0; 1 for what went wrong, told in one line; 2 for a wrong command line."""
    warnings.showwarning = _show_warning
    try:
        app(_json_to_screen(sys.argv[1:]))
    except (ValueError, RuntimeError, OSError) as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        _fail(f"This needs {package}: pip install 'focus-hf[{_EXTRAS[package]}]'")
    except KeyboardInterrupt:
        sys.exit(130)


def _json_to_screen(arguments: list[str]) -> list[str]:
    """Give ``--json`` its value ``-`` where it stands alone."""
    if not arguments or arguments[0] not in _JSON_FILES:
        return arguments
    result = []
    for argument, following in zip(arguments, [*arguments[1:], "--"], strict=True):
        result.append(argument)
        if argument == "--json" and following.startswith("--"):
            result.append("-")
    return result


def _fail(message: str) -> None:
    say(stderr(), f"focus-hf: {one_line(' '.join(message.split()), limit=LONGEST_LINE)}")  # it may quote a stranger
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
    say(stderr(), "\n".join(one_line(part, limit=LONGEST_LINE) for part in text.split("\n")))
