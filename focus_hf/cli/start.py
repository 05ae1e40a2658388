"""From the command line to a command, and how a user's mistakes are told."""

from __future__ import annotations

import sys
import warnings
from typing import TextIO

from ..escape import one_line
from .app import app, stderr

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


#: Characters of an error: several sentences.
_LONGEST_MESSAGE = 3_000


def _fail(message: str) -> None:
    text = one_line(" ".join(message.split()), limit=_LONGEST_MESSAGE)  # it may quote a stranger
    stderr().print(f"focus-hf: {text}", markup=False, highlight=False, soft_wrap=True)
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
    text = "\n".join(one_line(part, limit=_LONGEST_MESSAGE) for part in text.split("\n"))
    stderr().print(text, markup=False, highlight=False, soft_wrap=True)


def main() -> None:
    """Entry point. Exit code 0; 1 for what went wrong, told in one line; 2 for a wrong command line."""
    arguments = sys.argv[1:]
    warnings.showwarning = _show_warning
    try:
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
