"""Pages for a browser: repositories, cards, lists of files, commits, pull requests; a file is shown as it is.

No page fetches anything from elsewhere, or runs anything.
"""

from __future__ import annotations

import posixpath
import unicodedata
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, unquote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.responses import HTMLResponse, Response

from ..files import template_folder
from ..front_matter import split_card
from .http import HubAnswer
from .markdown import to_html
from .repos import commit_row, visible
from .repository import KINDS
from .visit import Visit

#: Longer cards and files are offered for download only.
MAX_SHOWN = 1_000_000

#: Longer cards are shown as they were written: a table of as many characters takes about a second to render.
MAX_RENDERED = 65_536

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src 'self'; style-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}


def _plain(value: object) -> str:
    """Text of a stranger's: what cannot be seen, or changes how the rest is read, is spelled out."""
    return "".join(
        f"\\u{ord(c):04x}" if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c not in "\n\t\u200d" else c
        for c in str(value)
    )


_TEMPLATES = Environment(
    loader=FileSystemLoader(template_folder()),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters["plain"] = _plain


def page(name: str, handler: Callable[[Visit], Any]) -> Callable[[Visit], Response]:
    """What a handler finds, as a page from the template ``local_hub_{name}``, which knows it as ``data``.

    Its errors are pages, too. Who has no token to show is not asked for one: the page is not there.
    """

    def handle(visit: Visit) -> Response:
        found, status, template = None, 200, name
        try:
            data = handler(visit)
            if isinstance(data, Response):
                return data
            found = visit.repository if "name" in visit.named else None
        except HubAnswer as error:
            missing, template = error.code == "RepoNotFound", "error"
            data = "There is no such page, or it is not for you." if missing else error.message
            status = 404 if missing else error.status
        html = _TEMPLATES.get_template(f"local_hub_{template}.html.jinja").render(visit=visit, found=found, data=data)
        return HTMLResponse(html.encode("utf-8", "replace"), status, _HEADERS)

    return handle


def index(visit: Visit) -> dict[str, Any]:
    return {kind: rows for kind in KINDS if (rows := visible(visit, kind))}


def card(visit: Visit) -> dict[str, Any]:
    found, files = visit.repository, visit.repository.files(visit.commit)
    readme, body, html = files.get("README.md"), None, None
    if readme and readme.lfs is None and readme.size <= MAX_SHOWN and b"\x00" not in (raw := found.read(readme)):
        body = split_card(raw.decode("utf-8", "replace"))[1]

    def address(relative: str) -> str | None:
        path = posixpath.normpath(unquote(relative).lstrip("/"))
        return f"{found.path}/resolve/main/{quote(path)}" if path in files else None

    if body is not None and len(body) <= MAX_RENDERED:
        html = Markup(to_html(body, address))  # made safe there
    rows = [(name, _cell(value)) for name, value in found.card(visit.commit).items()]
    return {"html": html, "text": body, "rows": rows, "closed": visit.refusal()}


def _cell(value: Any) -> str:
    """One value of a card's metadata in a line; what has parts of its own is only counted."""
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(part, (dict, list)) for part in value)):
        return "1 entry" if len(value) == 1 else f"{len(value)} entries"
    return ", ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)


def commit(visit: Visit) -> dict[str, Any]:
    """A commit and the names of the files that it changed."""
    found, changes = visit.repository, []
    shown = found.describe_commit(visit.commit)
    after = found.files(visit.commit)
    before = found.files(shown.parents[0].decode()) if shown.parents else {}
    for path in sorted(before.keys() | after.keys()):
        if before.get(path) != after.get(path):
            what = "added" if path not in before else "changed" if path in after else "deleted"
            changes.append({"path": path, "what": what, "size": after[path].size if path in after else None})
    return {"row": commit_row(shown), "changes": changes}
