"""Fill the template of a card."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from jinja2 import FileSystemLoader, StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment

from ..escape import escape
from ..records.results import mode_name, setting, setting_name, to_dense
from ..records.tasks import code_tables, ruler_tables
from ..templates import template_folder
from .summary import span, speed, weights

#: How a card's reader gets this package, in a shell; RELEASING.md says when it becomes `pip install focus-hf`.
INSTALL = "pip install .  # in a clone of focus_hf, which is not on the package index yet"

#: The package's own.
TEMPLATE = template_folder() / "focus_card.md.jinja"


def render(template: str | os.PathLike[str] | None, **values: Any) -> str:
    """The text of a card.

    Args:
        template: a template of one's own; it runs in a sandbox.
        values: what it may use.

    Raises:
        ValueError: there is no such template, or it cannot be filled.
    """
    path = TEMPLATE if template is None else Path(template)
    environment = SandboxedEnvironment(
        loader=FileSystemLoader([path.parent, template_folder()]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["escape_markdown"] = escape
    environment.filters["mode"] = _mode_markdown
    environment.filters["setting"] = _setting_markdown
    environment.filters["to_dense"] = to_dense
    environment.filters["ruler_tables"] = ruler_tables
    environment.filters["code_tables"] = code_tables
    environment.filters["span"] = span
    environment.filters["speed"] = speed
    environment.filters["weights"] = weights
    if not path.is_file():
        raise ValueError(f"{path} does not exist: template is a Jinja file for the card.")
    try:
        return environment.get_template(path.name).render(**values)
    except (TemplateError, TypeError, ValueError, ArithmeticError, AttributeError, KeyError) as error:
        raise ValueError(f"The card cannot be made: {error} ({type(error).__name__} in {path.name}).") from None


def _mode_markdown(row: dict[str, Any]) -> str:
    if row["mode"] == "hard":
        return f"**Focus**, {_setting_markdown(row)}"
    return mode_name(row["mode"], row.get("top_k"), row.get("width"), row.get("budget"))


def _setting_markdown(row: dict[str, Any]) -> str:
    return f"`{setting_name(*setting(row))}`"
