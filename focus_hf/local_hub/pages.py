"""Pages for a browser: repositories, cards, lists of files, commits, pull requests; a file is shown as it is.

No page fetches anything from elsewhere, or runs anything.
"""

from __future__ import annotations

import functools
import posixpath
import unicodedata
from collections.abc import Callable
from itertools import islice
from typing import Any
from urllib.parse import quote, unquote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from ..front_matter import split_card
from ..templates import template_folder
from .access import Target, target
from .changes import Entry
from .contents import inside, resolve
from .describe import commit_row, visible
from .http import HubAnswer
from .markdown import to_html
from .pull_requests import details, summary
from .repository import KINDS, Repository

#: Longer cards and files are offered for download only.
MAX_SHOWN = 1_000_000

#: Longer cards are shown as they were written: a table of as many characters takes about a second to render.
MAX_RENDERED = 65_536

COMMITS_SHOWN = 200

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src 'self'; style-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}


def _page(name: str, found: Repository | None = None, status: int = 200, **values: Any) -> HTMLResponse:
    """A page from the template ``local_hub_{name}``."""
    values |= {"found": found, "meta": found.meta() if found else {}, "title": found.id if found else "Local Hub"}
    html = _TEMPLATES.get_template(f"local_hub_{name}.html.jinja").render(values)
    return HTMLResponse(html.encode("utf-8", "replace"), status_code=status, headers=_HEADERS)


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


def _errors_as_pages(handler: Callable[[Request], Response]) -> Callable[[Request], Response]:
    """A handler whose errors are pages too. Who has no token to show is not asked for one: the page is not there."""

    @functools.wraps(handler)
    def handle(request: Request) -> Response:
        try:
            return handler(request)
        except HubAnswer as error:
            missing = error.code == "RepoNotFound"
            message = "There is no such page, or it is not for you." if missing else error.message
            return _page("error", status=404 if missing else error.status, message=message)

    return handle


#: A file as it is; what goes wrong is a page.
blob = _errors_as_pages(resolve)


@_errors_as_pages
def index(request: Request) -> Response:
    return _page("index", kinds=[(kind, rows) for kind in KINDS if (rows := visible(request, kind))])


@_errors_as_pages
def card(request: Request) -> Response:
    visit = target(request)
    found = visit.repository
    commit = found.resolve("main")
    files = found.files(commit)
    text = _text(found, files.get("README.md"))
    body = None if text is None else split_card(text)[1]

    def address(relative: str) -> str | None:
        path = posixpath.normpath(unquote(relative).lstrip("/"))
        return _file_url(found, "resolve", "main", path) if path in files else None

    html = None if body is None or len(body) > MAX_RENDERED else Markup(to_html(body, address))  # made safe there
    rows = [(name, _cell(value)) for name, value in found.card(commit).items()]
    return _page("card", found, html=html, text=body, rows=rows, closed=_closed(visit))


def _text(found: Repository, entry: Entry | None) -> str | None:
    """A file's text, if it is one and not too long."""
    if entry is None or entry.lfs is not None or entry.size > MAX_SHOWN:
        return None
    content = found.read(entry)
    return None if b"\x00" in content else content.decode("utf-8", "replace")


def _file_url(found: Repository, action: str, revision: str, path: str) -> str:
    """Address of a file's content (``resolve``) or of a folder (``tree``)."""
    return f"{found.path}/{action}/{quote(revision, safe='')}/{quote(path)}"


def _cell(value: Any) -> str:
    """One value of a card's metadata in a line; what has parts of its own is only counted."""
    parts = value if isinstance(value, list) else [value]
    if not any(isinstance(part, (dict, list)) for part in parts):
        return ", ".join("" if part is None and part is value else str(part) for part in parts)
    return "1 entry" if len(value) == 1 else f"{len(value)} entries"


def _closed(visit: Target) -> str | None:
    """Why the visitor cannot have the files, if so."""
    try:
        visit.check_files()
    except HubAnswer as error:
        return error.message
    return None


@_errors_as_pages
def tree(request: Request) -> Response:
    found, revision = target(request).repository, request.path_params["revision"]
    folder = request.path_params.get("path", "").strip("/")
    rows = [
        {
            "name": path.rpartition("/")[2],
            "page": _file_url(found, "resolve" if entry else "tree", revision, path),
            "size": entry.size if entry else None,
        }
        for path, entry in inside(found.files(found.resolve(revision)), folder).items()
    ]
    return _page("tree", found, revision=revision, folder=folder, rows=rows)


@_errors_as_pages
def commits(request: Request) -> Response:
    found = target(request).repository
    history = found.history(found.resolve(request.path_params["revision"]))
    rows = list(map(commit_row, islice(history, COMMITS_SHOWN + 1)))
    return _page("commits", found, rows=rows[:COMMITS_SHOWN], more=len(rows) > COMMITS_SHOWN)


@_errors_as_pages
def commit(request: Request) -> Response:
    """A commit and the names of the files that it changed."""
    found = target(request).repository
    shown = found.describe_commit(found.resolve(request.path_params["revision"]))
    after = found.files(shown.id.decode())
    before = found.files(shown.parents[0].decode()) if shown.parents else {}
    changes = []
    for path in sorted(before.keys() | after.keys()):
        if before.get(path) != after.get(path):
            what = "added" if path not in before else "changed" if path in after else "deleted"
            changes.append({"path": path, "what": what, "size": after[path].size if path in after else None})
    return _page("commit", found, row=commit_row(shown), changes=changes)


@_errors_as_pages
def pull_requests(request: Request) -> Response:
    found = target(request).repository
    return _page("pull_requests", found, rows=[summary(found, entry) for entry in found.meta()["pull_requests"][::-1]])


@_errors_as_pages
def pull_request(request: Request) -> Response:
    found = target(request).repository
    return _page("pull_request", found, entry=details(found, request.path_params["number"]))
