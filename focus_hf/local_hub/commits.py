"""Requests that change files: preupload and commits, on a branch or as a pull request."""

from __future__ import annotations

import base64
import re
import tempfile
from collections.abc import Iterator
from typing import IO, Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .access import Target, hub, target, writer
from .changes import LFS_POINTER, Changes, check_path, read_pointer
from .http import MAX_FILES, Body, HubAnswer, read_json, receive, sizes, text, with_body
from .hub import User
from .pull_requests import new_pull_request
from .repository import Repository, is_at

#: Bytes of a commit. What does not go through LFS is small; the client sends a few hundred files at a time.
MAX_COMMIT = 2 * 1024**3

#: Bytes of a line of a commit beyond those of its file: names, and the JSON around them.
_LINE_OVERHEAD = 64 * 1024

_PULL_REQUEST = re.compile(r"refs/pr/([0-9]{1,9})")


@with_body
def preupload(request: Request, body: Body) -> Response:
    """Say of each file whether it comes inside the commit or through LFS."""
    repository = _committer(request)[0].repository
    commit = repository.resolve(request.path_params["revision"])
    files, rows = repository.files(commit), []
    for path, size in sizes(body, "files", "path"):
        existing = files.get(path)
        rows.append(
            {
                "path": path,
                "uploadMode": "lfs" if size > hub(request).lfs_threshold else "regular",
                "shouldIgnore": False,
                "oid": None if existing is None else (existing.lfs or existing.blob_id),
            }
        )
    return JSONResponse({"files": rows, "commitOid": commit})


def xet_token(request: Request) -> Response:
    """The client's xet storage has no counterpart here; say what to do instead of failing obscurely."""
    raise HubAnswer(
        400,
        "This local Hub has no Xet storage, which the client uses for large files. "
        "Set HF_HUB_DISABLE_XET=1 before starting Python and try again.",
    )


def _committer(request: Request) -> tuple[Target, User]:
    """Who may commit where the request wants to: anybody who sees a repository may suggest changes to it."""
    user, found = writer(request), target(request)
    if number := _PULL_REQUEST.fullmatch(request.path_params["revision"]):
        known = found.repository.meta()["pull_requests"]
        if user.name not in [entry["author"] for entry in known if entry["num"] == int(number[1])]:
            found.check_write()
    elif not request.query_params.get("create_pr"):
        found.check_write("Forbidden: pass `create_pr=1` as a query parameter to create a Pull Request")
    return found, user


async def commit(request: Request) -> Response:
    """Apply the changes of an NDJSON body, all or none.

    The body goes to a file first and is then read line by line, so that neither a slow client nor a large commit holds
    up anybody else.
    """
    found, user = await run_in_threadpool(_committer, request)
    with tempfile.TemporaryFile(dir=hub(request).staging) as body:
        refusal = HubAnswer(413, f"The commit has more than {MAX_COMMIT:,} bytes: send several")
        await receive(request, body.write, MAX_COMMIT, refusal)
        body.seek(0)
        return await run_in_threadpool(_commit, request, found.repository, user, body)


def _commit(request: Request, repository: Repository, user: User, body: IO[bytes]) -> Response:
    header, changes = _read_changes(repository, body, longest=hub(request).lfs_threshold)
    revision, base = request.path_params["revision"], str(request.base_url).rstrip("/") + repository.path
    message = summary = text(header, "summary")
    if header.get("description"):
        message += "\n\n" + text(header, "description")
    parent = text(header, "parentCommit") if header.get("parentCommit") else None
    answer: dict[str, Any] = {"success": True}
    if request.query_params.get("create_pr"):
        start = repository.resolve(revision)
        if parent and not is_at(start, parent):  # it starts at the commit that its author saw
            start = repository.resolve(parent)
        with new_pull_request(repository, user.name, summary, revision) as entry:
            oid = repository.commit(entry["ref"], changes, message, user.name, start=start)
        answer["pullRequestUrl"] = f"{base}/discussions/{entry['num']}"
    else:
        ref = revision if _PULL_REQUEST.fullmatch(revision) else f"refs/heads/{revision}"
        oid = repository.commit(ref, changes, message, user.name, parent)
    return JSONResponse({**answer, "commitOid": oid, "commitUrl": f"{base}/commit/{oid}"})


def _read_changes(repository: Repository, body: IO[bytes], longest: int) -> tuple[dict[str, Any], Changes]:
    """Header and changes of a commit; the files go straight to the repository, where nothing names them yet."""
    header: dict[str, Any] = {}
    changes = Changes()
    try:
        for line in _lines(body, longest):
            item = read_json(line)
            key, value = item["key"], item["value"]
            if key == "header":
                header = dict(value)
                continue
            path = check_path(value["path"])
            if key == "file":
                raw = value["content"]
                content = base64.b64decode(raw, validate=True) if value.get("encoding") == "base64" else raw.encode()
                _check_pointer(repository, content)
                changes.files[path] = repository.store_blob(content)
            elif key == "lfsFile":
                changes.files[path] = repository.store_blob(_pointer(repository, value["oid"]))
            elif key == "deletedFile":
                changes.files[path] = None
            elif key == "deletedFolder":
                changes.folders.append(path)
            else:
                raise HubAnswer(400, f"Unknown operation {key!r} in commit")
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise HubAnswer(400, f"Malformed commit: {error!r}"[:300]) from None
    return header, changes


def _lines(body: IO[bytes], longest: int) -> Iterator[bytes]:
    """Lines of a commit; none is read that is longer than a file of ``longest`` bytes makes it."""
    longest = longest * 4 // 3 + _LINE_OVERHEAD  # base64
    for number, line in enumerate(iter(lambda: body.readline(longest + 1), b"")):
        if len(line) > longest:
            raise HubAnswer(413, f"A line of the commit has more than {longest:,} bytes: send large files through LFS")
        if number > MAX_FILES:
            raise HubAnswer(413, f"The commit changes more than {MAX_FILES:,} files: send several")
        yield line


def _pointer(repository: Repository, oid: str) -> bytes:
    stored = repository.lfs_path(oid)
    if not stored.is_file():
        raise HubAnswer(400, f"LFS object {oid} was not uploaded to this repository")
    return LFS_POINTER.format(oid=oid, size=stored.stat().st_size).encode()


def _check_pointer(repository: Repository, content: bytes) -> None:
    """Refuse a file that looks like the pointer to a large file but is not one of this repository's."""
    named = read_pointer(content)
    if named and content != _pointer(repository, named[0]):
        raise HubAnswer(400, f"LFS object {named[0]} has another size than its pointer says")
