"""Pages for a browser: repositories, cards, lists of files, commits, pull requests; a file is shown as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import islice
from typing import Any

from dulwich.objects import Commit
from starlette.requests import Request
from starlette.responses import Response

from ..front_matter import split_card
from .access import KINDS, Target, hub, target, visitor
from .changes import Entry
from .describe import card_data, describe, iso
from .errors import HubAnswer
from .listing import rows_of, visible
from .pages import MAX_RENDERED, MAX_SHOWN, card_html, file_url, page
from .pull_requests import details, find_pull_request, summary
from .routes_files import resolve
from .routes_trees import author_of, title_of

COMMITS_SHOWN = 200


def _page(handler: Callable[[Request], Response]) -> Callable[[Request], Response]:
    """A handler whose errors are pages too. Who has no token to show is not asked for one: the page is not there."""

    @functools.wraps(handler)
    def handle(request: Request) -> Response:
        try:
            return handler(request)
        except HubAnswer as error:
            missing = error.code == "RepoNotFound"
            message = "There is no such page, or it is not for you." if missing else error.message
            return page("error", 404 if missing else error.status, message=message, title="Local Hub")

    return handle


@_page
def index(request: Request) -> Response:
    user = visitor(request)
    kinds = []
    for kind in KINDS:
        rows = rows_of(visible(hub(request), kind, user), _line)
        kinds += [(kind, rows)] if rows else []
    return page("index", kinds=kinds)


def _line(found: Target) -> dict[str, Any]:
    """What the page of all repositories says of one."""
    return {**describe(found.repo_id, found.repository, found.repository.resolve("main")), "path": found.path}


@_page
def card(request: Request) -> Response:
    found = target(request)
    commit = found.repository.resolve("main")
    files = found.repository.files(commit)
    text = _text(found, files.get("README.md"))
    body = None if text is None else split_card(text)[1]
    html = None if body is None or len(body) > MAX_RENDERED else card_html(found, body, files)
    rows = [(name, _cell(value)) for name, value in card_data(found.repository, commit).items()]
    return page("card", found=found, html=html, text=body, rows=rows, closed=_closed(found))


def _cell(value: Any) -> str:
    """One value of a card's metadata in a line; what has parts of its own is only counted."""
    if isinstance(value, dict):
        return _count(value)
    if isinstance(value, list):
        parts = [str(item) for item in value if not isinstance(item, (dict, list))]
        return ", ".join(parts) if len(parts) == len(value) else _count(value)
    return "" if value is None else str(value)


def _count(value: dict[str, Any] | list[Any]) -> str:
    return "1 entry" if len(value) == 1 else f"{len(value)} entries"


def _closed(found: Target) -> str | None:
    """Why the visitor cannot have the files, if so."""
    try:
        found.check_files()
    except HubAnswer as error:
        return error.message
    return None


def _text(found: Target, entry: Entry | None) -> str | None:
    """A file's text, if it is one and not too long."""
    if entry is None or entry.lfs is not None or entry.size > MAX_SHOWN:
        return None
    content = found.repository.read(entry)
    return None if b"\x00" in content else content.decode("utf-8", "replace")


@_page
def tree(request: Request) -> Response:
    found, revision = target(request), request.path_params["revision"]
    folder = request.path_params.get("path", "").strip("/")
    files = found.repository.files(found.repository.resolve(revision))
    rows: dict[str, dict[str, Any]] = {}
    for path, entry in sorted(files.items()):
        if folder and not path.startswith(folder + "/"):
            continue
        name, _, deeper = path[len(folder) + 1 if folder else 0 :].partition("/")
        if deeper:
            inside = f"{folder}/{name}" if folder else name
            rows[name] = {"page": file_url(found, "tree", revision, inside), "size": None}
        else:
            rows[name] = {"page": file_url(found, "resolve", revision, path), "size": entry.size}
    if folder and not rows:
        raise HubAnswer(404, f"{folder} does not exist on {revision}")
    listed = [{"name": name, **row} for name, row in rows.items()]
    return page("tree", found=found, revision=revision, folder=folder, rows=listed)


#: A file as it is; what goes wrong is a page.
blob = _page(resolve)


def _row(commit: Commit) -> dict[str, str]:
    return {
        "id": commit.id.decode(),
        "title": title_of(commit),
        "author": author_of(commit),
        "date": iso(commit.commit_time),
    }


@_page
def commits(request: Request) -> Response:
    found = target(request)
    head = found.repository.resolve(request.path_params["revision"])
    rows = [_row(commit) for commit in islice(found.repository.history(head), COMMITS_SHOWN + 1)]
    return page("commits", found=found, rows=rows[:COMMITS_SHOWN], more=len(rows) > COMMITS_SHOWN)


@_page
def commit(request: Request) -> Response:
    """A commit and the names of the files that it changed."""
    found = target(request)
    shown = found.repository.describe_commit(found.repository.resolve(request.path_params["revision"]))
    after = found.repository.files(shown.id.decode())
    before = found.repository.files(shown.parents[0].decode()) if shown.parents else {}
    changes = []
    for path in sorted(before.keys() | after.keys()):
        if before.get(path) != after.get(path):
            what = "added" if path not in before else "changed" if path in after else "deleted"
            changes.append({"path": path, "what": what, "size": after[path].size if path in after else None})
    message = shown.message.decode("utf-8", "replace")
    return page("commit", found=found, row=_row(shown), message=message, changes=changes)


@_page
def pull_requests(request: Request) -> Response:
    found = target(request)
    rows = [summary(found, entry) for entry in found.repository.meta()["pull_requests"]]
    return page("pull_requests", found=found, rows=rows[::-1])


@_page
def pull_request(request: Request) -> Response:
    found = target(request)
    entry = find_pull_request(found.repository.meta(), request.path_params["number"])
    return page("pull_request", found=found, entry=details(found, entry))
