"""Pull requests: opened, listed, closed, merged. What people say about them has no place here."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .access import Target, target, writer
from .describe import iso
from .errors import HubAnswer
from .repository import Repository
from .requests import Body, text, with_body
from .users import User

PullRequest = dict[str, Any]

#: Characters of a title.
MAX_TITLE = 512


def pull_request_ref(number: int) -> str:
    return f"refs/pr/{number}"


@contextmanager
def new_pull_request(
    repository: Repository, author: str, title: str, base: str, status: str = "open"
) -> Iterator[PullRequest]:
    """Open a pull request against a branch.

    It exists once the block ends; an exception inside leaves everything as it was. Whoever opens another one at the
    same time waits, so that no two get the same number.
    """
    with repository.changing() as meta:
        number = len(meta["pull_requests"]) + 1
        if f"refs/heads/{base}" not in repository.refs():
            raise HubAnswer(404, f"Invalid rev id: {base}", code="RevisionNotFound")
        if pull_request_ref(number) in repository.refs():  # of a server that was killed right here
            repository.delete_ref(pull_request_ref(number))
        entry = {
            "num": number,
            "title": title,
            "author": author,
            "status": status,
            "base": f"refs/heads/{base}",
            "createdAt": iso(time.time()),
            "mergeCommitId": None,
        }
        yield entry
        meta["pull_requests"] = [*meta["pull_requests"], entry]


def find_pull_request(meta: dict[str, Any], number: int) -> PullRequest:
    if not 1 <= number <= len(meta["pull_requests"]):
        raise HubAnswer(404, f"Pull request {number} does not exist")
    return meta["pull_requests"][number - 1]


def is_open(entry: PullRequest) -> bool:
    return entry["status"] in ("open", "draft")


def summary(found: Target, entry: PullRequest) -> dict[str, Any]:
    """A pull request as listings show it."""
    return {
        **{name: entry[name] for name in ("num", "title", "status", "createdAt")},
        "isPullRequest": True,
        "author": {"name": entry["author"]},
        "repo": {"name": found.repo_id, "type": found.kind.rstrip("s")},
    }


def details(found: Target, entry: PullRequest) -> dict[str, Any]:
    """A pull request with its commits and conflicts."""
    repository, refs = found.repository, found.repository.refs()
    ref, base = pull_request_ref(entry["num"]), entry["base"]
    events: list[dict[str, Any]] = []
    clash: list[str] = []
    if ref in refs and base in refs:
        known = {commit.id for commit in repository.history(refs[base])}
        added = takewhile(lambda commit: commit.id not in known, repository.history(refs[ref]))
        for commit in added:
            data = {"subject": commit.message.decode().split("\n")[0], "oid": commit.id.decode()}
            events.append(_event("commit", commit.commit_time, commit.author.decode().split(" <")[0], data))
        clash = repository.conflicts(ref, base)[1] if is_open(entry) else []
    changes = {"base": base, "mergeCommitId": entry["mergeCommitId"]}
    return {**summary(found, entry), "events": events[::-1], "filesWithConflicts": clash, "changes": changes}


def _event(kind: str, when: float, author: str, data: dict[str, Any]) -> dict[str, Any]:
    who = {"name": author}
    return {"id": secrets.token_hex(12), "type": kind, "createdAt": iso(when), "author": who, "data": data}


# -- requests ------------------------------------------------------------------------------------------------------


def list_pull_requests(request: Request) -> Response:
    found, query = target(request), request.query_params
    kind, status, author = query.get("type", "all"), query.get("status", "all"), query.get("author")
    rows = [
        summary(found, entry)
        for entry in reversed(found.repository.meta()["pull_requests"])
        if kind != "discussion"
        and status in ("all", "open" if is_open(entry) else "closed")
        and author in (None, entry["author"])
    ]
    return JSONResponse({"discussions": rows, "count": len(rows), "start": 0})


@with_body
def open_pull_request(request: Request, body: Body) -> Response:
    """A draft to commit to; whoever sees a repository may suggest changes."""
    user, found = writer(request), target(request)
    if not body.get("pullRequest"):
        raise HubAnswer(400, "This Hub has pull requests and no other discussions")
    title = text(body, "title", longest=MAX_TITLE)
    with new_pull_request(found.repository, user.name, title, "main", status="draft") as entry:
        found.repository.add_ref(pull_request_ref(entry["num"]), found.repository.resolve("main"))
    url = f"{found.path}/discussions/{entry['num']}"
    return JSONResponse({"num": entry["num"], "url": url, "pullRequest": True})


def pull_request(request: Request) -> Response:
    found = target(request)
    return JSONResponse(details(found, find_pull_request(found.repository.meta(), request.path_params["number"])))


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
    user, found = writer(request), target(request)
    found.check_write()
    with found.repository.changing() as meta:
        entry = find_pull_request(meta, request.path_params["number"])
        if not is_open(entry):
            raise HubAnswer(400, f"Pull request {entry['num']} cannot be merged: it is {entry['status']}")
        message = f"{entry['title']} (#{entry['num']})"
        ref = pull_request_ref(entry["num"])
        entry["mergeCommitId"] = found.repository.merge(ref, entry["base"], message, user.name)
        entry["status"] = "merged"
    return _new_status(entry, user)


def _new_status(entry: PullRequest, user: User) -> Response:
    return JSONResponse({"newStatus": _event("status-change", time.time(), user.name, {"status": entry["status"]})})
