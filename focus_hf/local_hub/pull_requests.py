"""Pull requests: opened, listed, closed, merged. What people say about them has no place here."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .http import HubAnswer, no_revision, text
from .repos import commit_row, iso
from .repository import Repository
from .visit import Visit

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
            raise no_revision(base)
        if entry["ref"] in refs:  # of a server that was killed right here
            repository.delete_ref(f"refs/pr/{number}")
        yield entry
        meta["pull_requests"] = [*meta["pull_requests"], entry]


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


def list_pull_requests(visit: Visit) -> dict[str, Any]:
    found, query = visit.repository, visit.query
    kind, status, author = query.get("type", "all"), query.get("status", "all"), query.get("author")
    rows = [
        summary(found, entry)
        for entry in reversed(found.meta()["pull_requests"])
        if kind != "discussion"
        and status in ("all", "open" if _is_open(entry) else "closed")
        and author in (None, entry["author"])
    ]
    return {"discussions": rows, "count": len(rows), "start": 0}


def open_pull_request(visit: Visit) -> dict[str, Any]:
    """A draft to commit to; whoever sees a repository may suggest changes."""
    user, found = visit.sender(), visit.repository
    if not visit.body.get("pullRequest"):
        raise HubAnswer(400, "This Hub has pull requests and no other discussions")
    title = text(visit.body, "title", longest=MAX_TITLE)
    with new_pull_request(found, user.name, title, "main", status="draft") as entry:
        found.add_ref(entry["ref"], found.resolve("main"))
    return {"num": entry["num"], "url": f"{found.path}/discussions/{entry['num']}", "pullRequest": True}


def pull_request(visit: Visit) -> dict[str, Any]:
    """One pull request with its commits and conflicts."""
    found = visit.repository
    entry, refs = _named(visit, found.meta()), found.refs()
    ref, base = f"refs/pr/{entry['num']}", entry["base"]
    events: list[dict[str, Any]] = []
    clash: list[str] = []
    if ref in refs and base in refs:
        known = {commit.id for commit in found.history(refs[base])}
        for row in (commit_row(commit) for commit in found.history(refs[ref]) if commit.id not in known):
            data = {"subject": row["title"], "oid": row["id"]}
            events.insert(0, _event("commit", row["date"], row["authors"][0]["user"], data))
        clash = found.conflicts(ref, base)[1] if _is_open(entry) else []
    changes = {"base": base, "mergeCommitId": entry["mergeCommitId"]}
    return {**summary(found, entry), "events": events, "filesWithConflicts": clash, "changes": changes}


def change_status(visit: Visit) -> dict[str, Any]:
    """Close or open again."""
    user, found, status = visit.sender(), visit.repository, visit.body.get("status")
    if status not in ("open", "closed"):
        raise HubAnswer(400, "status must be open or closed")
    with found.changing() as meta:
        entry = _named(visit, meta)
        if entry["author"] != user.name:
            visit.writable()
        if entry["status"] == "merged":
            raise HubAnswer(400, f"Pull request {entry['num']} is merged already")
        entry["status"] = status
    return _new_status(entry, user.name)


def merge(visit: Visit) -> dict[str, Any]:
    user, found = visit.sender(), visit.writable()
    with found.changing() as meta:
        entry = _named(visit, meta)
        if not _is_open(entry):
            raise HubAnswer(400, f"Pull request {entry['num']} cannot be merged: it is {entry['status']}")
        changes, clash = found.conflicts(f"refs/pr/{entry['num']}", entry["base"])
        if clash:
            raise HubAnswer(409, f"Cannot merge, files changed on both sides: {', '.join(clash)}")
        message = f"{entry['title']} (#{entry['num']})"
        entry["mergeCommitId"] = found.commit(entry["base"], changes, message, user.name)
        entry["status"] = "merged"
    return _new_status(entry, user.name)


def _named(visit: Visit, meta: dict[str, Any]) -> PullRequest:
    """The pull request that the URL names."""
    number = visit.named["number"]
    if not 1 <= number <= len(meta["pull_requests"]):
        raise HubAnswer(404, f"Pull request {number} does not exist")
    return meta["pull_requests"][number - 1]


def _new_status(entry: PullRequest, author: str) -> dict[str, Any]:
    return {"newStatus": _event("status-change", iso(time.time()), author, {"status": entry["status"]})}


def _event(kind: str, date: str, author: str, data: dict[str, Any]) -> dict[str, Any]:
    return {"id": secrets.token_hex(12), "type": kind, "createdAt": date, "author": {"name": author}, "data": data}
