"""Pull requests: opened, listed, closed, merged. What people say about them has no place here."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .access import target, writer
from .describe import commit_row, iso
from .http import Body, HubAnswer, text, with_body
from .hub import User
from .repository import Repository

PullRequest = dict[str, Any]

#: Characters of a title.
MAX_TITLE = 512


@contextmanager
def new_pull_request(
    repository: Repository, author: str, title: str, base: str, status: str = "open"
) -> Iterator[PullRequest]:
    """Open a pull request against a branch, whose commits the block puts at its "ref".

    It exists once the block ends; an exception inside leaves everything as it was. Whoever opens another one at the
    same time waits, so that no two get the same number.
    """
    with repository.changing() as meta:
        number, refs = len(meta["pull_requests"]) + 1, repository.refs()
        entry = {
            "num": number,
            "title": title,
            "author": author,
            "status": status,
            "ref": f"refs/pr/{number}",
            "base": f"refs/heads/{base}",
            "createdAt": iso(time.time()),
            "mergeCommitId": None,
        }
        if entry["base"] not in refs:
            raise HubAnswer(404, f"Invalid rev id: {base}", code="RevisionNotFound")
        if entry["ref"] in refs:  # of a server that was killed right here
            repository.delete_ref(f"refs/pr/{number}")
        yield entry
        meta["pull_requests"] = [*meta["pull_requests"], entry]


def find_pull_request(meta: dict[str, Any], number: int) -> PullRequest:
    if not 1 <= number <= len(meta["pull_requests"]):
        raise HubAnswer(404, f"Pull request {number} does not exist")
    return meta["pull_requests"][number - 1]


def _is_open(entry: PullRequest) -> bool:
    return entry["status"] in ("open", "draft")


def summary(repository: Repository, entry: PullRequest) -> dict[str, Any]:
    """A pull request as listings show it."""
    return {
        **{name: entry[name] for name in ("num", "title", "status", "createdAt")},
        "isPullRequest": True,
        "author": {"name": entry["author"]},
        "repo": {"name": repository.id, "type": repository.type},
    }


def details(repository: Repository, number: int) -> dict[str, Any]:
    """A pull request with its commits and conflicts."""
    entry, refs = find_pull_request(repository.meta(), number), repository.refs()
    ref, base = f"refs/pr/{number}", entry["base"]
    events: list[dict[str, Any]] = []
    clash: list[str] = []
    if ref in refs and base in refs:
        for row in map(commit_row, repository.history(refs[ref], known=refs[base])):
            data = {"subject": row["title"], "oid": row["id"]}
            events.append(_event("commit", row["date"], row["authors"][0]["user"], data))
        clash = repository.conflicts(ref, base)[1] if _is_open(entry) else []
    changes = {"base": base, "mergeCommitId": entry["mergeCommitId"]}
    return {
        **summary(repository, entry),
        "events": events[::-1],
        "filesWithConflicts": clash,
        "changes": changes,
    }


def _event(kind: str, date: str, author: str, data: dict[str, Any]) -> dict[str, Any]:
    return {"id": secrets.token_hex(12), "type": kind, "createdAt": date, "author": {"name": author}, "data": data}


# -- requests ------------------------------------------------------------------------------------------------------


def list_pull_requests(request: Request) -> Response:
    found, query = target(request).repository, request.query_params
    kind, status, author = query.get("type", "all"), query.get("status", "all"), query.get("author")
    rows = [
        summary(found, entry)
        for entry in reversed(found.meta()["pull_requests"])
        if kind != "discussion"
        and status in ("all", "open" if _is_open(entry) else "closed")
        and author in (None, entry["author"])
    ]
    return JSONResponse({"discussions": rows, "count": len(rows), "start": 0})


@with_body
def open_pull_request(request: Request, body: Body) -> Response:
    """A draft to commit to; whoever sees a repository may suggest changes."""
    user, found = writer(request), target(request).repository
    if not body.get("pullRequest"):
        raise HubAnswer(400, "This Hub has pull requests and no other discussions")
    title = text(body, "title", longest=MAX_TITLE)
    with new_pull_request(found, user.name, title, "main", status="draft") as entry:
        found.add_ref(entry["ref"], found.resolve("main"))
    return JSONResponse({"num": entry["num"], "url": f"{found.path}/discussions/{entry['num']}", "pullRequest": True})


def pull_request(request: Request) -> Response:
    return JSONResponse(details(target(request).repository, request.path_params["number"]))


@with_body
def change_status(request: Request, body: Body) -> Response:
    """Close or open again."""
    user, found, status = writer(request), target(request), body.get("status")
    if status not in ("open", "closed"):
        raise HubAnswer(400, "status must be open or closed")
    with found.repository.changing() as meta:
        entry = find_pull_request(meta, request.path_params["number"])
        if entry["author"] != user.name:
            found.check_write()
        if entry["status"] == "merged":
            raise HubAnswer(400, f"Pull request {entry['num']} is merged already")
        entry["status"] = status
    return _new_status(entry, user)


@with_body
def merge(request: Request, body: Body) -> Response:
    user, found, number = writer(request), target(request), request.path_params["number"]
    found.check_write()
    with found.repository.changing() as meta:
        entry = find_pull_request(meta, number)
        if not _is_open(entry):
            raise HubAnswer(400, f"Pull request {number} cannot be merged: it is {entry['status']}")
        message = f"{entry['title']} (#{number})"
        entry["mergeCommitId"] = found.repository.merge(f"refs/pr/{number}", entry["base"], message, user.name)
        entry["status"] = "merged"
    return _new_status(entry, user)


def _new_status(entry: PullRequest, user: User) -> Response:
    event = _event("status-change", iso(time.time()), user.name, {"status": entry["status"]})
    return JSONResponse({"newStatus": event})
