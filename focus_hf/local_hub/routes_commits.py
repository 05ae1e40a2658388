"""Requests that change files: preupload and commits, on a branch or as a pull request."""

from __future__ import annotations

import base64
import binascii
import re
import tempfile
from collections.abc import Iterator
from typing import IO, Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from .access import Target, hub, target, writer
from .changes import LFS_POINTER, Changes, read_pointer
from .errors import HubAnswer
from .paths import check_path
from .pull_requests import new_pull_request, pull_request_ref
from .requests import MAX_FILES, Body, check_count, number_of_bytes, read_json, text, with_body
from .users import User

#: Bytes of a commit. What does not go through LFS is small; the client sends a few hundred files at a time.
MAX_COMMIT = 2 * 1024**3

#: Bytes of a line of a commit beyond those of its file: names, and the JSON around them.
_LINE_OVERHEAD = 64 * 1024

_PULL_REQUEST = re.compile(r"refs/pr/([0-9]{1,9})")
_ASK = "Forbidden: pass `create_pr=1` as a query parameter to create a Pull Request"


@with_body
def preupload(request: Request, body: Body) -> Response:
    """Say of each file whether it comes inside the commit or through LFS."""
    found, _ = _committer(request)
    commit = found.repository.resolve(request.path_params["revision"])
    files, threshold, rows = found.repository.files(commit), hub(request).lfs_threshold, []
    try:
        check_count(body["files"])
        wanted = [(str(file["path"]), number_of_bytes(file["size"])) for file in body["files"]]
    except (KeyError, TypeError, ValueError):
        raise HubAnswer(400, "Malformed preupload") from None
    for path, size in wanted:
        existing = files.get(path)
        rows.append(
            {
                "path": path,
                "uploadMode": "lfs" if size > threshold else "regular",
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
    number = _PULL_REQUEST.fullmatch(request.path_params["revision"])
    if number:
        known = found.repository.meta()["pull_requests"]
        if user.name not in [entry["author"] for entry in known if entry["num"] == int(number[1])]:
            found.check_write()
    elif not request.query_params.get("create_pr"):
        found.check_write(_ASK)
    return found, user


async def commit(request: Request) -> Response:
    """Apply the changes of an NDJSON body, all or none.

    The body goes to a file first and is then read line by line, so that neither a slow client nor a large commit holds
    up anybody else.
    """
    found, user = await run_in_threadpool(_committer, request)
    with tempfile.TemporaryFile(dir=hub(request).storage.staging.folder) as body:
        received = 0
        try:
            async for chunk in request.stream():
                received += len(chunk)
                if received > MAX_COMMIT:
                    raise HubAnswer(413, f"The commit has more than {MAX_COMMIT:,} bytes: send several")
                await run_in_threadpool(body.write, chunk)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody is there to read it
        return await run_in_threadpool(_commit, request, found, user, body)


def _commit(request: Request, found: Target, user: User, body: IO[bytes]) -> Response:
    body.seek(0)
    header, changes = _read_changes(request, found, body)
    revision, base = request.path_params["revision"], str(request.base_url).rstrip("/")
    summary, description = text(header, "summary"), header.get("description")
    message = "\n\n".join([summary, *([text(header, "description")] if description else [])])
    parent = text(header, "parentCommit") if header.get("parentCommit") else None
    answer: dict[str, Any] = {}
    if request.query_params.get("create_pr"):
        start = _start(found, revision, parent)
        with new_pull_request(found.repository, user.name, summary, revision) as entry:
            number = entry["num"]
            oid = found.repository.commit(pull_request_ref(number), changes, message, user.name, start=start)
        answer["pullRequestUrl"] = f"{base}{found.path}/discussions/{number}"
    else:
        ref = revision if _PULL_REQUEST.fullmatch(revision) else f"refs/heads/{revision}"
        oid = found.repository.commit(ref, changes, message, user.name, parent)
    return JSONResponse({**answer, "success": True, "commitOid": oid, "commitUrl": f"{base}{found.path}/commit/{oid}"})


def _start(found: Target, revision: str, parent: str | None) -> str:
    """Where a pull request starts: at the commit that its author saw, or where its branch is now."""
    head = found.repository.resolve(revision)
    if parent is None or (len(parent) >= 7 and head.startswith(parent)):
        return head
    return found.repository.resolve(parent)


def _read_changes(request: Request, found: Target, body: IO[bytes]) -> tuple[dict[str, Any], Changes]:
    """Header and changes of a commit; the files go straight to the repository, where nothing names them yet."""
    header: dict[str, Any] = {}
    changes = Changes()
    try:
        for line in _lines(body, longest=hub(request).lfs_threshold):
            item = read_json(line)
            key, value = item["key"], item["value"]
            if key == "header":
                header = dict(value)
                continue
            path = check_path(value["path"])
            if key == "file":
                raw = value["content"]
                content = base64.b64decode(raw, validate=True) if value.get("encoding") == "base64" else raw.encode()
                _check_pointer(found, content)
                changes.files[path] = found.repository.store_blob(content)
            elif key == "lfsFile":
                changes.files[path] = found.repository.store_blob(_pointer(found, value["oid"]))
            elif key == "deletedFile":
                changes.files[path] = None
            elif key == "deletedFolder":
                changes.folders.append(path)
            else:
                raise HubAnswer(400, f"Unknown operation {key!r} in commit")
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError, binascii.Error) as error:
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


def _pointer(found: Target, oid: str) -> bytes:
    stored = found.repository.lfs_path(oid)
    if not stored.is_file():
        raise HubAnswer(400, f"LFS object {oid} was not uploaded to this repository")
    return LFS_POINTER.format(oid=oid, size=stored.stat().st_size).encode()


def _check_pointer(found: Target, content: bytes) -> None:
    """Refuse a file that looks like the pointer to a large file but is not one of this repository's."""
    named = read_pointer(content)
    if named and content != _pointer(found, named[0]):
        raise HubAnswer(400, f"LFS object {named[0]} has another size than its pointer says")
