"""Downloads: ``/{id}/resolve/{revision}/{path}``, whole or in part."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from .access import hub, repository
from .errors import HubAnswer

#: Fetching one of these counts as one download of the repository.
COUNTED = ("adapter_config.json", "config.json")


def resolve(request: Request) -> Response:
    kind, repo_id, found = repository(request)
    commit = found.resolve(request.path_params["revision"])
    entry = found.entry(commit, request.path_params["path"])
    headers = {"X-Repo-Commit": commit, "ETag": f'"{entry.lfs or entry.blob_id}"', "Accept-Ranges": "bytes"}
    if entry.lfs is not None:
        headers["X-Linked-Etag"], headers["X-Linked-Size"] = f'"{entry.lfs}"', str(entry.size)
    if request.method == "GET" and entry.path in COUNTED:
        hub(request).storage.count_download(kind, repo_id)
    if entry.lfs is not None:
        return FileResponse(hub(request).storage.lfs.path(entry.lfs), headers=headers)
    return _bytes(request, found.read(entry), headers)


def _bytes(request: Request, content: bytes, headers: dict[str, str]) -> Response:
    wanted, status = request.headers.get("range"), 200
    if wanted:
        start, stop = _range(wanted, len(content))
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        content, status = content[start:stop], 206
    response = Response(content, status_code=status, headers=headers, media_type="application/octet-stream")
    if request.method == "HEAD":
        response.body = b""
    return response


def _range(header: str, size: int) -> tuple[int, int]:
    """First and past-the-last byte of a single ``bytes=`` range."""
    unit, _, span = header.partition("=")
    first, _, last = span.partition("-")
    try:
        if first:
            start, stop = int(first), min(int(last) + 1 if last else size, size)
        else:
            start, stop = max(size - int(last), 0), size
    except ValueError:
        start, stop = size, size
    if unit.strip() != "bytes" or start >= stop:
        raise HubAnswer(416, f"Cannot serve range {header!r} of {size} bytes")
    return start, stop
