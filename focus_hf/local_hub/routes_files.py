"""Downloads: ``/{id}/resolve/{revision}/{path}``, whole or in part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from .access import target
from .changes import Entry
from .errors import HubAnswer

#: Fetching one of these counts as one download of the repository.
COUNTED = ("adapter_config.json", "config.json")

#: What a browser may show. Everything else it is told to save, so that no file of a stranger runs as part of the Hub.
PICTURES = {
    ".gif": "image/gif",
    ".jpeg": "image/jpeg",
    ".jpg": "image/jpeg",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".webp": "image/webp",
}
_TEXT = (".csv", ".json", ".jsonl", ".md", ".py", ".txt", ".yaml", ".yml")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox"

_BLOCK = 1 << 18


def resolve(request: Request) -> Response:
    found = target(request)
    path = request.path_params["path"]
    if path != "README.md":  # who is asked to request access may read what for
        found.check_files()
    commit = found.repository.resolve(request.path_params["revision"])
    entry = found.repository.entry(commit, path)
    headers = {
        "X-Repo-Commit": commit,
        "ETag": f'"{entry.lfs or entry.blob_id}"',
        "Accept-Ranges": "bytes",
        "Content-Type": media_type(entry.path),
        "Content-Security-Policy": _POLICY,
    }
    if entry.lfs is not None:
        headers["X-Linked-Etag"], headers["X-Linked-Size"] = f'"{entry.lfs}"', str(entry.size)
    first, stop, status = _wanted(request, entry, headers["ETag"])
    if status == 206:
        headers["Content-Range"] = f"bytes {first}-{stop - 1}/{entry.size}"
    headers["Content-Length"] = str(stop - first)
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers)
    if entry.path in COUNTED:
        with found.repository.changing() as meta:
            meta["downloads"] += 1
    if entry.lfs is None:
        return Response(found.repository.read(entry)[first:stop], status_code=status, headers=headers)
    part = _part(found.repository.lfs_path(entry.lfs), first, stop)
    return StreamingResponse(part, status_code=status, headers=headers)


def _part(path: Path, first: int, stop: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(first)
        while first < stop:
            block = file.read(min(_BLOCK, stop - first))
            if not block:
                raise OSError(f"{path} is shorter than it was")
            first += len(block)
            yield block


def media_type(path: str) -> str:
    suffix = PurePosixPath(path).suffix.lower()
    if suffix in _TEXT or PurePosixPath(path).name == ".gitattributes":
        return "text/plain; charset=utf-8"
    return PICTURES.get(suffix, "application/octet-stream")


def _wanted(request: Request, entry: Entry, etag: str) -> tuple[int, int, int]:
    """First and past-the-last byte of what a request wants, and the status of the answer.

    As the standard allows, headers that ask for several ranges at once or cannot be understood are ignored.
    """
    everything = (0, entry.size, 200)
    unit, _, span = request.headers.get("range", "").partition("=")
    first, dash, last = (part.strip() for part in span.partition("-"))
    if unit.strip().lower() != "bytes" or not dash or request.headers.get("if-range", etag) != etag:
        return everything
    if not all(number == "" or (number.isascii() and number.isdecimal()) for number in (first, last)):
        return everything
    if not first and not last or len(first + last) > 40:
        return everything
    if first:
        start, stop = int(first), min(int(last) + 1, entry.size) if last else entry.size
        if last and int(last) < start:
            return everything
    else:
        start, stop = max(entry.size - int(last), 0), entry.size
    if start >= stop:
        raise HubAnswer(
            416,
            f"Cannot serve range {span!r} of {entry.size} bytes",
            headers={"Content-Range": f"bytes */{entry.size}"},
        )
    return start, stop, 206
