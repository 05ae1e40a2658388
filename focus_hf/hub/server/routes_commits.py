"""Requests that change files: preupload, LFS, commits, pull requests."""

from __future__ import annotations

import base64
import binascii
import json
import re
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .access import hub, repository, writer
from .describe import iso
from .errors import HubAnswer
from .storage import LFS_POINTER, Repository

_PULL_REQUEST = re.compile(r"refs/pr/([0-9]+)")


async def preupload(request: Request) -> Response:
    """Say of each file whether it comes inside the commit or through LFS."""
    writer(request)
    _, _, found = repository(request)
    revision = request.path_params["revision"]
    files = found.files(found.resolve(revision))
    threshold = hub(request).lfs_threshold
    rows = []
    for file in (await request.json())["files"]:
        existing = files.get(file["path"])
        rows.append(
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["size"] > threshold else "regular",
                "shouldIgnore": False,
                "oid": None if existing is None else (existing.lfs or existing.blob_id),
            }
        )
    return JSONResponse({"files": rows, "commitOid": found.resolve(revision)})


def xet_token(request: Request) -> Response:
    """The client's xet storage has no counterpart here; say what to do instead of failing obscurely."""
    raise HubAnswer(
        400,
        "This local Hub has no Xet storage, which the client uses for large files. "
        "Set HF_HUB_DISABLE_XET=1 before starting Python and try again.",
    )


async def lfs_batch(request: Request) -> Response:
    writer(request)
    repository(request)
    lfs, objects = hub(request).storage.lfs, []
    base = str(request.base_url).rstrip("/")
    for item in (await request.json())["objects"]:
        row: dict[str, Any] = {"oid": item["oid"], "size": item["size"], "authenticated": True}
        if not lfs.has(item["oid"]):
            verify = f"{base}/{request.path_params['namespace']}/{request.path_params['name']}.git/info/lfs/verify"
            row["actions"] = {
                "upload": {"href": f"{base}/lfs/{item['oid']}", "header": {}},
                "verify": {"href": verify, "header": {}},
            }
        objects.append(row)
    return JSONResponse({"transfer": "basic", "objects": objects})


async def lfs_upload(request: Request) -> Response:
    await hub(request).storage.lfs.receive(request.path_params["oid"], request.stream())
    return Response()


async def lfs_verify(request: Request) -> Response:
    item = await request.json()
    path = hub(request).storage.lfs.path(item["oid"])
    if not path.is_file() or path.stat().st_size != item["size"]:
        raise HubAnswer(404, f"No complete upload of {item['oid']}")
    return JSONResponse({})


async def commit(request: Request) -> Response:
    writer(request)
    kind, repo_id, found = repository(request)
    header, changes, folders = _read_changes(request, await request.body())
    revision = request.path_params["revision"]
    base = str(request.base_url).rstrip("/")
    answer: dict[str, Any] = {}
    if request.query_params.get("create_pr"):
        number = _open_discussion(request, kind, repo_id, found, header["summary"], revision, pull_request=True)
        ref, parent = f"refs/pr/{number}", None
        answer["pullRequestUrl"] = f"{base}/{repo_id}/discussions/{number}"
    else:
        ref = revision if _PULL_REQUEST.fullmatch(revision) else f"refs/heads/{revision}"
        parent = header.get("parentCommit")
    message = "\n\n".join(filter(None, [header["summary"], header.get("description")]))
    oid = found.commit(ref, changes, folders, message, parent)
    return JSONResponse({**answer, "success": True, "commitOid": oid, "commitUrl": f"{base}/{repo_id}/commit/{oid}"})


def _read_changes(request: Request, body: bytes) -> tuple[dict[str, Any], dict[str, bytes | None], list[str]]:
    """Parse the NDJSON of a commit: its header, content by path (``None`` deletes), folders to delete."""
    header: dict[str, Any] = {}
    changes: dict[str, bytes | None] = {}
    folders: list[str] = []
    try:
        for line in body.splitlines():
            item = json.loads(line)
            key, value = item["key"], item["value"]
            if key == "header":
                header = value
                continue
            path = _check_path(value["path"])
            if key == "file":
                raw = value["content"]
                changes[path] = (
                    base64.b64decode(raw, validate=True) if value.get("encoding") == "base64" else raw.encode()
                )
            elif key == "lfsFile":
                changes[path] = _pointer(request, value["oid"])
            elif key == "deletedFile":
                changes[path] = None
            elif key == "deletedFolder":
                folders.append(path)
            else:
                raise HubAnswer(400, f"Unknown operation {key!r} in commit")
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise HubAnswer(400, f"Malformed commit: {error!r}") from None
    if not header.get("summary"):
        raise HubAnswer(400, "A commit needs a summary")
    return header, changes, folders


def _pointer(request: Request, oid: str) -> bytes:
    stored = hub(request).storage.lfs.path(oid)
    if not stored.is_file():
        raise HubAnswer(400, f"LFS object {oid} was not uploaded")
    return LFS_POINTER.format(oid=oid, size=stored.stat().st_size).encode()


def _check_path(path: str) -> str:
    parts = path.rstrip("/").split("/")
    if any(part in ("", ".", "..") or part.lower() == ".git" or "\x00" in part for part in parts):
        raise HubAnswer(400, f"Invalid path in repository: {path!r}")
    return path


# -- discussions ---------------------------------------------------------------------------------------------------


def _open_discussion(
    request: Request, kind: str, repo_id: str, found: Repository, title: str, base: str, *, pull_request: bool
) -> int:
    storage = hub(request).storage
    known = storage.meta(kind, repo_id)["discussions"]
    number = len(known) + 1
    if pull_request:
        found.set_ref(f"refs/pr/{number}", found.resolve(base))
    entry = {
        "num": number,
        "title": title,
        "status": "open",
        "isPullRequest": pull_request,
        "base": f"refs/heads/{base}",
        "createdAt": iso(time.time()),
        "mergeCommitId": None,
    }
    storage.update_meta(kind, repo_id, discussions=[*known, entry])
    return number


async def discussions(request: Request) -> Response:
    kind, repo_id, found = repository(request)
    if request.method == "POST":
        writer(request)
        body = await request.json()
        number = _open_discussion(
            request, kind, repo_id, found, body["title"], "main", pull_request=bool(body.get("pullRequest"))
        )
        return JSONResponse({"num": number, "url": f"/{repo_id}/discussions/{number}", "pullRequest": True})
    rows = [_details(kind, repo_id, entry) for entry in hub(request).storage.meta(kind, repo_id)["discussions"]]
    return JSONResponse({"discussions": rows, "count": len(rows), "start": 0})


def _find(request: Request) -> tuple[str, str, Repository, dict[str, Any], list[dict[str, Any]]]:
    kind, repo_id, found = repository(request)
    known = hub(request).storage.meta(kind, repo_id)["discussions"]
    number = request.path_params["number"]
    if not 1 <= number <= len(known):
        raise HubAnswer(404, f"Discussion {number} does not exist")
    return kind, repo_id, found, known[number - 1], known


def discussion(request: Request) -> Response:
    kind, repo_id, _, entry, _ = _find(request)
    return JSONResponse(_details(kind, repo_id, entry))


def merge(request: Request) -> Response:
    writer(request)
    kind, repo_id, found, entry, known = _find(request)
    if not entry["isPullRequest"] or entry["status"] not in ("open", "draft"):
        raise HubAnswer(400, f"Pull request {entry['num']} cannot be merged: it is {entry['status']}")
    entry["mergeCommitId"] = found.merge(
        f"refs/pr/{entry['num']}", entry["base"], f"{entry['title']} (#{entry['num']})"
    )
    entry["status"] = "merged"
    hub(request).storage.update_meta(kind, repo_id, discussions=known)
    return JSONResponse({"newStatus": "merged"})


def _details(kind: str, repo_id: str, entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "num": entry["num"],
        "title": entry["title"],
        "status": entry["status"],
        "isPullRequest": entry["isPullRequest"],
        "createdAt": entry["createdAt"],
        "author": {"name": "demo"},
        "repo": {"name": repo_id, "type": kind.rstrip("s")},
        "changes": {"base": entry["base"], "mergeCommitId": entry["mergeCommitId"]},
        "filesWithConflicts": [],
        "events": [],
    }
