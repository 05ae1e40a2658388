"""Uploads of large files: what is needed, and the upload itself."""

from __future__ import annotations

from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from .access import hub, target, writer
from .errors import HubAnswer
from .lfs import MAX_LFS, check_signature, receive, signed_query
from .requests import Body, check_count, number_of_bytes, with_body


@with_body
def lfs_batch(request: Request, body: Body) -> Response:
    """Say which files to upload, and where; whoever may open a pull request may upload."""
    writer(request)
    found = target(request)
    base, objects = str(request.base_url).rstrip("/"), []
    for oid, size in _objects(body):
        row: dict[str, Any] = {"oid": oid, "size": size, "authenticated": True}
        if not found.repository.lfs_path(oid).is_file():
            query = signed_query(hub(request).secret, oid, found.kind, found.repo_id, size)
            row["actions"] = {"upload": {"href": f"{base}/lfs/{oid}?{query}", "header": {}}}
        objects.append(row)
    return JSONResponse({"transfer": "basic", "objects": objects})


def _objects(body: Body) -> list[tuple[str, int]]:
    try:
        check_count(body["objects"])
        objects = [(str(item["oid"]), number_of_bytes(item["size"])) for item in body["objects"]]
    except (KeyError, TypeError, ValueError):
        raise HubAnswer(422, "Malformed LFS batch") from None
    for oid, size in objects:
        if size > MAX_LFS:
            raise HubAnswer(422, f"{oid} has {size:,} bytes, more than {MAX_LFS:,}: split the file")
    return objects


async def lfs_upload(request: Request) -> Response:
    """Store one file, for whoever holds the address that `lfs_batch` gave out."""
    oid, here = request.path_params["oid"], hub(request)
    kind, repo_id, size = check_signature(here.secret, oid, dict(request.query_params))
    found = await run_in_threadpool(here.storage.find, kind, repo_id)
    if found is None:
        raise HubAnswer(404, "Repository not found", code="RepoNotFound")
    try:
        await receive(found.lfs_path(oid), oid, size, request.stream(), here.storage.staging)
    except ClientDisconnect:
        return Response(status_code=400)  # nobody is there to read it
    return Response()
