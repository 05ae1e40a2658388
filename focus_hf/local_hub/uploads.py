"""What changes files: commits, on a branch or as a pull request, and large files, which are sent before them (LFS)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any
from urllib.parse import parse_qsl, urlencode

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .changes import LFS_POINTER, Changes, check_path, read_pointer
from .http import MAX_FILES, HubAnswer, receive, sizes, text
from .hub import User
from .pull_requests import new_pull_request
from .repository import Repository, is_at
from .visit import Visit

#: Bytes of a commit. What does not go through LFS is small; the client sends a few hundred files at a time.
MAX_COMMIT = 2 * 1024**3

#: Bytes of a line of a commit beyond those of its file: names, and the JSON around them.
_LINE_OVERHEAD = 64 * 1024

#: An upload must start within this many seconds after it was announced.
UPLOAD_STARTS_WITHIN = 6 * 3600

#: Bytes of a file: as many as the real Hub takes in one.
MAX_LFS = 50 * 1000**3

_PULL_REQUEST = re.compile(r"refs/pr/([0-9]{1,9})")


# -- commits -------------------------------------------------------------------------------------------------------


def _committer(visit: Visit) -> User:
    """Who may commit where the request wants to: anybody who sees a repository may suggest changes to it."""
    user, found = visit.sender(), visit.repository
    if number := _PULL_REQUEST.fullmatch(visit.named["revision"]):
        known = found.meta()["pull_requests"]
        if user.name not in [entry["author"] for entry in known if entry["num"] == int(number[1])]:
            visit.writable()
    elif not visit.query.get("create_pr"):
        visit.writable("Forbidden: pass `create_pr=1` as a query parameter to create a Pull Request")
    return user


def preupload(visit: Visit) -> dict[str, Any]:
    """Say of each file whether it comes inside the commit or through LFS."""
    _committer(visit)
    files, rows = visit.repository.files(visit.commit), []
    for path, size in sizes(visit.body, "files", "path"):
        mode = "lfs" if size > visit.hub.lfs_threshold else "regular"
        oid = (files[path].lfs or files[path].blob_id) if path in files else None
        rows.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    return {"files": rows, "commitOid": visit.commit}


def xet_token(visit: Visit) -> Response:
    """The client's xet storage has no counterpart here; say what to do instead of failing obscurely."""
    raise HubAnswer(
        400,
        "This local Hub has no Xet storage, which the client uses for large files. "
        "Set HF_HUB_DISABLE_XET=1 before starting Python and try again.",
    )


async def commit(request: Request) -> Response:
    """Apply the changes of an NDJSON body, all or none.

    The body goes to a file first and is then read line by line, so that neither a slow client nor a large commit holds
    up anybody else.
    """
    visit = Visit(request)
    user = await run_in_threadpool(_committer, visit)
    with tempfile.TemporaryFile(dir=visit.hub.staging) as body:
        refusal = HubAnswer(413, f"The commit has more than {MAX_COMMIT:,} bytes: send several")
        await receive(request, body.write, MAX_COMMIT, refusal)
        body.seek(0)
        return await run_in_threadpool(_commit, visit, user, body)


def _commit(visit: Visit, user: User, body: IO[bytes]) -> Response:
    found, revision, base = visit.repository, visit.named["revision"], visit.base + visit.repository.path
    header, changes = _read_changes(found, body, visit.hub.lfs_threshold)
    message = summary = text(header, "summary")
    if header.get("description"):
        message += "\n\n" + text(header, "description")
    parent = text(header, "parentCommit") if header.get("parentCommit") else None
    answer: dict[str, Any] = {"success": True}
    if visit.query.get("create_pr"):
        start = found.resolve(revision)
        if parent and not is_at(start, parent):  # it starts at the commit that its author saw
            start = found.resolve(parent)
        with new_pull_request(found, user.name, summary, revision) as entry:
            oid = found.commit(entry["ref"], changes, message, user.name, start=start)
        answer["pullRequestUrl"] = f"{base}/discussions/{entry['num']}"
    else:
        ref = revision if _PULL_REQUEST.fullmatch(revision) else f"refs/heads/{revision}"
        oid = found.commit(ref, changes, message, user.name, parent)
    return JSONResponse({**answer, "commitOid": oid, "commitUrl": f"{base}/commit/{oid}"})


def _read_changes(repository: Repository, body: IO[bytes], longest: int) -> tuple[dict[str, Any], Changes]:
    """Header and changes of a commit; the files go straight to the repository, where nothing names them yet."""
    header: dict[str, Any] = {}
    changes = Changes()
    try:
        for line in _lines(body, longest):
            item = json.loads(line)
            key, value = item["key"], item["value"]
            if key == "header":
                header = dict(value)
                continue
            path = check_path(value["path"])
            if key == "file":
                raw = value["content"]
                content = base64.b64decode(raw, validate=True) if value.get("encoding") == "base64" else raw.encode()
                # No file may look like the pointer to a large one but be none of this repository's.
                if (named := read_pointer(content)) and content != _pointer(repository, named[0]):
                    raise HubAnswer(400, f"LFS object {named[0]} has another size than its pointer says")
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


# -- large files ---------------------------------------------------------------------------------------------------


def lfs_batch(visit: Visit) -> dict[str, Any]:
    """Say which files to upload, and where; whoever may open a pull request may upload."""
    visit.sender()
    found, objects = visit.repository, []
    fields = {"kind": found.kind, "repo": found.id, "expires": int(time.time()) + UPLOAD_STARTS_WITHIN}
    for oid, size in sizes(visit.body, "objects", "oid"):
        if size > MAX_LFS:
            raise HubAnswer(422, f"{oid} has {size:,} bytes, more than {MAX_LFS:,}: split the file")
        row: dict[str, Any] = {"oid": oid, "size": size, "authenticated": True}
        if not found.lfs_path(oid).is_file():
            query = urlencode({**fields, "size": size})
            href = f"{visit.base}/lfs/{oid}?{query}&signature={_signature(visit, oid, query)}"
            row["actions"] = {"upload": {"href": href, "header": {}}}
        objects.append(row)
    return {"transfer": "basic", "objects": objects}


def _signature(visit: Visit, oid: str, query: str) -> str:
    """Permission to store this one file, for the repository and of the size that the query names.

    The client sends no token to the address that the batch answer gives, as it may be another company's storage.
    """
    return hmac.new(visit.hub.secret, f"{oid}?{query}".encode(), hashlib.sha256).hexdigest()


async def lfs_upload(request: Request) -> Response:
    """Store one file, for whoever holds the address that `lfs_batch` gave out; refused if it is not what it says."""
    visit, oid = Visit(request), request.path_params["oid"]
    query, _, signature = request.scope["query_string"].decode("latin-1").rpartition("&signature=")
    if not hmac.compare_digest(_signature(visit, oid, query).encode(), signature.encode()):
        raise HubAnswer(403, "This is not an upload address that this Hub gave out.")
    fields = dict(parse_qsl(query))
    if int(fields["expires"]) < time.time():
        raise HubAnswer(403, "This upload address has expired.")
    found = await run_in_threadpool(visit.hub.find, fields["kind"], fields["repo"])

    size, digest = int(fields["size"]), hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=visit.hub.staging) as folder:
        partial = Path(folder) / oid
        with partial.open("wb") as file:

            def write(block: bytes) -> None:
                digest.update(block)
                file.write(block)

            refusal = HubAnswer(422, f"The upload is longer than the {size} bytes that were announced.")
            received = await receive(request, write, size, refusal)
            if digest.hexdigest() != oid:
                named = f"{received} bytes with sha256 {digest.hexdigest()}"
                raise HubAnswer(422, f"The upload has {named}; {size} with {oid} were announced.")
            file.flush()
            await run_in_threadpool(os.fsync, file.fileno())
        await run_in_threadpool(found.store_large, partial, oid)
    return Response()
