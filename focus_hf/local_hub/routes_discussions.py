"""Requests about discussions and pull requests: open, list, comment, rename, close, merge."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .access import Target, target, writer
from .discussions import (
    Discussion,
    add_comment,
    add_event,
    changing_discussion,
    details,
    edit_comment,
    find_discussion,
    new_discussion,
    pull_request_ref,
    summary,
)
from .errors import HubAnswer
from .requests import Body, text, with_body
from .users import User

PAGE = 50

#: Characters of a comment and of a title, as on other sites of this kind: all of them are read with the page.
MAX_COMMENT, MAX_TITLE = 65_536, 512


def list_discussions(request: Request) -> Response:
    found, query = target(request), request.query_params
    rows = [
        summary(found.kind, found.repo_id, entry)
        for entry in reversed(found.repository.meta()["discussions"])
        if _is_wanted(entry, query.get("type", "all"), query.get("status", "all"), query.get("author"))
    ]
    number = query.get("p", "")
    start = int(number) * PAGE if number.isdecimal() and len(number) < 10 else 0
    return JSONResponse({"discussions": rows[start : start + PAGE], "count": len(rows), "start": start})


def _is_wanted(entry: Discussion, kind: str, status: str, author: str | None) -> bool:
    is_open = entry["status"] in ("open", "draft")
    return (
        kind in ("all", "pull_request" if entry["isPullRequest"] else "discussion")
        and status in ("all", "open" if is_open else "closed")
        and author in (None, entry.get("author", "demo"))
    )


@with_body
def open_discussion(request: Request, body: Body) -> Response:
    """Whoever sees a repository may discuss it and suggest changes."""
    user, found = writer(request), target(request)
    base = "main" if body.get("pullRequest") else None
    with new_discussion(found.repository, user.name, text(body, "title", longest=MAX_TITLE), base) as entry:
        if body.get("description"):
            add_comment(entry, user.name, text(body, "description", longest=MAX_COMMENT))
        if base is not None:
            entry["status"] = "draft"
            found.repository.add_ref(pull_request_ref(entry["num"]), found.repository.resolve(base))
    url = f"{found.path}/discussions/{entry['num']}"
    return JSONResponse({"num": entry["num"], "url": url, "pullRequest": base is not None})


def discussion(request: Request) -> Response:
    found = target(request)
    entry = find_discussion(found.repository.meta(), request.path_params["number"])
    return JSONResponse(details(found.kind, found.repo_id, found.repository, entry))


@with_body
def comment(request: Request, body: Body) -> Response:
    user, found = writer(request), target(request)
    with changing_discussion(found.repository, request.path_params["number"]) as entry:
        event = add_comment(entry, user.name, text(body, "comment", longest=MAX_COMMENT))
    return JSONResponse({"newMessage": event})


@with_body
def change_comment(request: Request, body: Body) -> Response:
    """Edit a comment, or hide it."""
    user, found = writer(request), target(request)
    with changing_discussion(found.repository, request.path_params["number"]) as entry:
        events = [e for e in entry.get("events", []) if e["id"] == request.path_params["comment"]]
        if not events or events[0]["type"] != "comment":
            raise HubAnswer(404, "Comment does not exist")
        _check_author(found, user, events[0]["author"]["name"])
        action = request.path_params["action"]
        if action not in ("edit", "hide"):
            raise HubAnswer(404, "Not found")
        edit_comment(events[0], user.name, text(body, "content", longest=MAX_COMMENT) if action == "edit" else None)
    return JSONResponse({"updatedComment": events[0]})


@with_body
def rename(request: Request, body: Body) -> Response:
    user, found = writer(request), target(request)
    with changing_discussion(found.repository, request.path_params["number"]) as entry:
        _check_author(found, user, entry.get("author"))
        change = {"from": entry["title"], "to": text(body, "title", longest=MAX_TITLE)}
        entry["title"] = change["to"]
        event = add_event(entry, "title-change", user.name, change)
    return JSONResponse({"newTitle": event})


@with_body
def change_status(request: Request, body: Body) -> Response:
    """Close or open again."""
    user, found, status = writer(request), target(request), body.get("status")
    if status not in ("open", "closed"):
        raise HubAnswer(400, "status must be open or closed")
    with changing_discussion(found.repository, request.path_params["number"]) as entry:
        _check_author(found, user, entry.get("author"))
        if entry["status"] == "merged":
            raise HubAnswer(400, f"Pull request {entry['num']} is merged already")
        event = _set_status(entry, user, status, body)
    return JSONResponse({"newStatus": event})


@with_body
def merge(request: Request, body: Body) -> Response:
    user, found = writer(request), target(request)
    found.check_write()
    with changing_discussion(found.repository, request.path_params["number"]) as entry:
        if not entry["isPullRequest"] or entry["status"] not in ("open", "draft"):
            raise HubAnswer(400, f"Pull request {entry['num']} cannot be merged: it is {entry['status']}")
        message = f"{entry['title']} (#{entry['num']})"
        ref = pull_request_ref(entry["num"])
        entry["mergeCommitId"] = found.repository.merge(ref, entry["base"], message, user.name)
        event = _set_status(entry, user, "merged", body)
    return JSONResponse({"newStatus": event})


def _set_status(entry: Discussion, user: User, status: str, body: Body) -> dict[str, Any]:
    if body.get("comment"):
        add_comment(entry, user.name, text(body, "comment", longest=MAX_COMMENT))
    entry["status"] = status
    return add_event(entry, "status-change", user.name, {"status": status})


def _check_author(found: Target, user: User, author: str | None) -> None:
    if author != user.name:
        found.check_write()
