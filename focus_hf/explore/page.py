"""The page: one HTML file that needs nothing else, and runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ..files import write_atomically
from ..templates import template_folder
from .data import ExplorerData
from .pack import BUDGET, Packed, pack

_TEMPLATE = "explore.html.jinja"
_STYLE = "explore.css"

#: In the order in which they stand in the page.
_SCRIPTS = ("explore-data.js", "explore-map.js", "explore-text.js", "explore-panel.js", "explore.js")


@dataclass(frozen=True)
class Page:
    """A page as HTML, and what is in it."""

    html: str
    packed: Packed


def render(data: ExplorerData, budget: int = BUDGET) -> Page:
    """The page as one HTML document.

    Text from outside is in it only as JSON, which the page's script puts into the document as text. A content security
    policy allows that one script by its hash and forbids everything else: other scripts, requests, forms.

    Args:
        data: what is on the page.
        budget: characters of data that should not be exceeded.
    """
    folder = template_folder()
    script = "".join((folder / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    script = f'"use strict";\n(() => {{\n{script}}})();\n'
    style = (folder / _STYLE).read_text(encoding="utf-8")
    packed = pack(data, budget)
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    html = environment.get_template(_TEMPLATE).render(
        title=data.adapter,
        window=f"{data.pattern.local_window:,}",
        sinks=f" and to the first {data.pattern.sink_tokens} of the text" if data.pattern.sink_tokens else "",
        cells=data.by_cells,
        policy=(
            f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'; "
            "form-action 'none'"
        ),
        # Our own files and JSON that cannot end its element: nothing here may be escaped once more.
        script=Markup(script),
        style=Markup(style),
        data=Markup(packed.text),
    )
    return Page(html, packed)


def write(page: Page, path: str | os.PathLike[str]) -> int:
    """Write a page.

    Returns:
        Its size in bytes.
    """
    # A lone surrogate in a name has no place in UTF-8; tokens hold none, see `focus_hf.explore.text.visible`.
    content = page.html.encode("utf-8", errors="replace")
    write_atomically(Path(path), content)
    return len(content)


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
