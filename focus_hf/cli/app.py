"""The command line itself: what all commands share, and how their mistakes are told."""

from __future__ import annotations

import json
import sys
from typing import Any

import typer
from rich.console import Console

app = typer.Typer(
    name="focus-hf",
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


def _fail(message: str) -> None:
    stderr().print(f"focus-hf: {' '.join(message.split())}", markup=False, highlight=False, soft_wrap=True)
    sys.exit(1)


def stderr() -> Console:
    return Console(stderr=True)


def main() -> None:
    """Entry point. Exit code 0; 1 for what went wrong, told in one line; 2 for a wrong command line."""
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
