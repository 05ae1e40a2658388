"""Uploads of large files: what is needed, the signed addresses that they go to, and the upload itself."""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from typing import Any
from urllib.parse import parse_qsl, urlencode

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .access import hub, target, writer
from .http import Body, HubAnswer, receive, sizes, with_body

#: An upload must start within this many seconds after it was announced.
UPLOAD_STARTS_WITHIN = 6 * 3600

#: Bytes of a file: as many as the real Hub takes in one.
MAX_LFS = 50 * 1000**3


@with_body
def lfs_batch(request: Request, body: Body) -> Response:
    """Say which files to upload, and where; whoever may open a pull request may upload."""
    writer(request)
    found = target(request).repository
    base, objects = str(request.base_url).rstrip("/"), []
    for oid, size in sizes(body, "objects", "oid"):
        if size > MAX_LFS:
            raise HubAnswer(422, f"{oid} has {size:,} bytes, more than {MAX_LFS:,}: split the file")
        row: dict[str, Any] = {"oid": oid, "size": size, "authenticated": True}
        if not found.lfs_path(oid).is_file():
            query = urlencode(
                {
                    "kind": found.kind,
                    "repo": found.id,
                    "size": size,
                    "expires": int(time.time()) + UPLOAD_STARTS_WITHIN,
                }
            )
            signature = _signature(request, oid, query)
            href = f"{base}/lfs/{oid}?{query}&signature={signature}"
            row["actions"] = {"upload": {"href": href, "header": {}}}
        objects.append(row)
    return JSONResponse({"transfer": "basic", "objects": objects})


def _signature(request: Request, oid: str, query: str) -> str:
    """Permission to store this one file, for the repository and of the size that the query names.

    The client sends no token to the address that the batch answer gives, as it may be another company's storage.
    """
    return hmac.new(hub(request).secret, f"{oid}?{query}".encode(), hashlib.sha256).hexdigest()


async def lfs_upload(request: Request) -> Response:
    """Store one file, for whoever holds the address that `lfs_batch` gave out; refused if it is not what it says."""
    oid, here = request.path_params["oid"], hub(request)
    query, _, signature = request.scope["query_string"].decode("latin-1").rpartition("&signature=")
    if not hmac.compare_digest(_signature(request, oid, query).encode(), signature.encode()):
        raise HubAnswer(403, "This is not an upload address that this Hub gave out.")
    fields = dict(parse_qsl(query))
    if int(fields["expires"]) < time.time():
        raise HubAnswer(403, "This upload address has expired.")
    found = await run_in_threadpool(here.find, fields["kind"], fields["repo"])

    size, digest = int(fields["size"]), hashlib.sha256()
    with here.upload() as file:

        def write(block: bytes) -> None:
            digest.update(block)
            file.write(block)

        def finish() -> None:
            file.flush()
            os.fsync(file.fileno())
            with found.writing():  # where nobody takes it for abandoned
                file.close()
                os.replace(file.name, found.lfs_path(oid))

        too_long = HubAnswer(422, f"The upload is longer than the {size} bytes that were announced.")
        received = await receive(request, write, size, too_long)
        if received != size:
            raise HubAnswer(422, f"The upload has {received} bytes; {size} were announced.")
        if digest.hexdigest() != oid:
            raise HubAnswer(422, f"The uploaded content has sha256 {digest.hexdigest()}, not {oid}.")
        await run_in_threadpool(finish)
    return Response()
