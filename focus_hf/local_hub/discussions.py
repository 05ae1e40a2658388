"""Discussions and pull requests of a repository: what happened in them, in the Hub's shapes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

from .describe import iso
from .errors import HubAnswer
from .markdown import to_html
from .repository import Repository

Discussion = dict[str, Any]


def pull_request_ref(number: int) -> str:
    return f"refs/pr/{number}"


@contextmanager
def new_discussion(repository: Repository, author: str, title: str, base: str | None = None) -> Iterator[Discussion]:
    """Open a discussion, or a pull request where there is a ``base`` branch.

    It exists once the block ends; an exception inside leaves everything as it was. Whoever opens another one at the
    same time waits, so that no two get the same number.
    """
    with repository.changing() as meta:
        number = len(meta["discussions"]) + 1
        entry = {
            "num": number,
            "title": title,
            "author": author,
            "status": "open",
            "isPullRequest": base is not None,
            "base": None if base is None else f"refs/heads/{base}",
            "createdAt": iso(time.time()),
            "mergeCommitId": None,
            "events": [],
        }
        if base is not None:
            if f"refs/heads/{base}" not in repository.refs():
                raise HubAnswer(404, f"Invalid rev id: {base}", code="RevisionNotFound")
            if pull_request_ref(number) in repository.refs():  # of a server that was killed right here
                repository.delete_ref(pull_request_ref(number))
        yield entry
        meta["discussions"] = [*meta["discussions"], entry]


@contextmanager
def changing_discussion(repository: Repository, number: int) -> Iterator[Discussion]:
    """A discussion, to be changed inside the block."""
    with repository.changing() as meta:
        yield find_discussion(meta, number)


def find_discussion(meta: dict[str, Any], number: int) -> Discussion:
    if not 1 <= number <= len(meta["discussions"]):
        raise HubAnswer(404, f"Discussion {number} does not exist")
    return meta["discussions"][number - 1]


def add_event(entry: Discussion, kind: str, author: str, data: dict[str, Any]) -> dict[str, Any]:
    event = {
        "id": secrets.token_hex(12),
        "type": kind,
        "createdAt": iso(time.time()),
        "author": {"name": author},
        "data": data,
    }
    entry.setdefault("events", []).append(event)
    return event


def add_comment(entry: Discussion, author: str, content: str) -> dict[str, Any]:
    data = {"edited": False, "hidden": False, "numEdits": 0, "history": [], "latest": _version(author, content)}
    return add_event(entry, "comment", author, data)


def edit_comment(event: dict[str, Any], author: str, content: str | None) -> None:
    """Replace a comment's text; ``None`` hides it for good."""
    data = event["data"]
    if content is None:
        data.update(hidden=True, history=[], latest=_version(author, ""))
        return
    data["history"].insert(0, data["latest"])
    data.update(edited=True, numEdits=len(data["history"]), latest=_version(author, content))


def _version(author: str, content: str) -> dict[str, Any]:
    return {"raw": content, "html": to_html(content), "updatedAt": iso(time.time()), "author": {"name": author}}


def summary(kind: str, repo_id: str, entry: Discussion) -> dict[str, Any]:
    """A discussion as listings show it."""
    return {
        "num": entry["num"],
        "title": entry["title"],
        "status": entry["status"],
        "isPullRequest": entry["isPullRequest"],
        "createdAt": entry["createdAt"],
        "author": {"name": entry.get("author", "demo")},
        "repo": {"name": repo_id, "type": kind.rstrip("s")},
        "numComments": sum(event["type"] == "comment" for event in entry.get("events", [])),
    }


def details(kind: str, repo_id: str, repository: Repository, entry: Discussion) -> dict[str, Any]:
    """A discussion with everything that happened in it; of a pull request also its commits and conflicts."""
    known = {**summary(kind, repo_id, entry), "events": list(entry.get("events", []))}
    if not entry["isPullRequest"]:
        return known
    clash: list[str] = []
    if entry["status"] in ("open", "draft") and entry["base"] in repository.refs():
        clash = repository.conflicts(pull_request_ref(entry["num"]), entry["base"])[1]
    known["events"] = sorted([*known["events"], *_commits(repository, entry)], key=lambda event: event["createdAt"])
    known["filesWithConflicts"] = clash
    known["changes"] = {"base": entry["base"], "mergeCommitId": entry["mergeCommitId"]}
    return known


def _commits(repository: Repository, entry: Discussion) -> list[dict[str, Any]]:
    """Commits that a pull request adds to its branch."""
    refs = repository.refs()
    ref = pull_request_ref(entry["num"])
    if ref not in refs or entry["base"] not in refs:
        return []
    known = {commit.id for commit in repository.history(refs[entry["base"]])}
    added = takewhile(lambda commit: commit.id not in known, repository.history(refs[ref]))
    return [
        {
            "id": commit.id.decode()[:24],
            "type": "commit",
            "createdAt": iso(commit.commit_time),
            "author": {"name": commit.author.decode().split(" <")[0]},
            "data": {"subject": commit.message.decode().split("\n")[0], "oid": commit.id.decode()},
        }
        for commit in added
    ]
