"""HTML pages: templates, and the headers that keep a page from fetching or running anything."""

from __future__ import annotations

import posixpath
import unicodedata
from typing import Any
from urllib.parse import quote, unquote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.responses import HTMLResponse

from ..templates import template_folder
from .access import Target
from .changes import Entry
from .markdown import to_html

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src 'self'; style-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}

#: Longer cards and files are offered for download only.
MAX_SHOWN = 1_000_000

#: Longer cards are shown as they were written: a table of as many characters takes about a second to render.
MAX_RENDERED = 65_536


def page(name: str, status: int = 200, **values: Any) -> HTMLResponse:
    """A page from the template ``local_hub_{name}``."""
    found: Target | None = values.setdefault("found", None)
    values["meta"] = found.repository.meta() if found else {}
    values.setdefault("title", found.repo_id if found else "Local Hub")
    html = _TEMPLATES.get_template(f"local_hub_{name}.html.jinja").render(values)
    return HTMLResponse(html.encode("utf-8", "replace"), status_code=status, headers=_HEADERS)


def plain(value: object) -> str:
    """Text of a stranger's: what cannot be seen, or changes how the rest is read, is spelled out."""
    return "".join(
        f"\\u{ord(c):04x}" if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c not in "\n\t\u200d" else c
        for c in str(value)
    )


def file_url(found: Target, action: str, revision: str, path: str = "") -> str:
    """Address of a file: its content (``resolve``) or its folder (``tree``)."""
    return f"{found.path}/{action}/{quote(revision, safe='')}" + (f"/{quote(path)}" if path else "")


def card_html(found: Target, text: str, files: dict[str, Entry]) -> Markup:
    """A card's Markdown as HTML, with links to and pictures of the repository's own files."""

    def address(relative: str) -> str | None:
        path = posixpath.normpath(unquote(relative).lstrip("/"))
        return file_url(found, "resolve", "main", path) if path in files else None

    return Markup(to_html(text, address))  # made safe there


_TEMPLATES = Environment(
    loader=FileSystemLoader(template_folder()),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters["plain"] = plain
