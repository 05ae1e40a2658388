"""Where the templates of pages and cards are."""

from __future__ import annotations

from pathlib import Path


def template_folder() -> Path:
    """``hub_templates``: inside an installed package, beside it in a source checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "hub_templates"
    return installed if installed.is_dir() else package.parent / "hub_templates"
