"""What is in a repository: folders, downloads (``/{id}/resolve/{revision}/{path}``), commits, branches and tags."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from .changes import Entry, folders_of
from .http import HubAnswer, answer, check_count, no_entry, text
from .repos import commit_row
from .visit import Visit

#: Fetching one of these counts as one download of the repository.
COUNTED = ("adapter_config.json", "config.json")

#: What a browser may show. Everything else it is told to save, so that no file of a stranger runs as part of the Hub.
_SHOWN = {
    ".gif": "image/gif",
    ".jpeg": "image/jpeg",
    ".jpg": "image/jpeg",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".webp": "image/webp",
    **dict.fromkeys(
        (".csv", ".json", ".jsonl", ".md", ".py", ".txt", ".yaml", ".yml", ".gitattributes"),
        "text/plain; charset=utf-8",
    ),
}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox"

_RANGE = re.compile(r"\s*bytes\s*=\s*([0-9]{0,19})\s*-\s*([0-9]{0,19})\s*", re.IGNORECASE)
_BLOCK = 1 << 18


def inside(files: dict[str, Entry], folder: str, *, recursive: bool = False) -> dict[str, Entry | None]:
    """Files and folders (``None``) that a folder holds, by path.

    Raises:
        HubAnswer: 404 if there is no such folder.
    """
    start = f"{folder}/" if folder else ""
    found: dict[str, Entry | None] = {}
    for path, entry in files.items():
        if path.startswith(start):
            parts = path.removeprefix(start).split("/")
            levels = [start + "/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
            for level in levels if recursive else levels[:1]:
                found[level] = entry if level == path else None
    if folder and not found:
        raise no_entry(folder)
    return dict(sorted(found.items()))


def tree(visit: Visit) -> list[dict[str, Any]]:
    files, commit = visit.repository.files(visit.commit), visit.commit
    recursive = visit.query.get("recursive", "").lower() in ("true", "1")
    last = commit_row(visit.repository.describe_commit(commit))
    return [
        {"type": "directory", "path": path, "oid": commit, "size": 0}
        if entry is None
        else {"type": "file", "path": path, **entry.facts(), "lastCommit": last}
        for path, entry in inside(files, visit.path, recursive=recursive).items()
    ]


def paths_info(visit: Visit) -> list[dict[str, Any]]:
    files = visit.repository.files(visit.commit)
    folders = folders_of(files)
    wanted, rows = visit.body.get("paths", []), []
    wanted = [wanted] if isinstance(wanted, str) else wanted
    if not isinstance(wanted, list) or not all(isinstance(path, str) for path in wanted):
        raise HubAnswer(400, "paths must be a list of texts")
    check_count(wanted)
    for path in wanted:
        if path in files:
            rows.append({"type": "file", "path": path, **files[path].facts()})
        elif path.rstrip("/") in folders:
            rows.append({"type": "directory", "path": path, "oid": "0" * 40, "size": 0})
    return rows


def resolve(visit: Visit) -> Response:
    """A file, or the part of it that is asked for."""
    refusal = visit.refusal()
    if refusal and visit.path != "README.md":  # who is asked to request access may read what for
        raise refusal
    repository, path = visit.repository, visit.path
    entry = repository.entry(visit.commit, path)
    etag = f'"{entry.lfs or entry.blob_id}"'
    headers = {
        "X-Repo-Commit": visit.commit,
        "ETag": etag,
        "Accept-Ranges": "bytes",
        "Content-Type": _media_type(path),
        "Content-Security-Policy": _POLICY,
    }
    if entry.lfs is not None:
        headers["X-Linked-Etag"], headers["X-Linked-Size"] = etag, str(entry.size)
    span, status = _span(visit.request, entry.size, etag), 200
    first, stop = span or (0, entry.size)
    if span:
        if first >= stop:
            wanted = visit.request.headers["range"]
            refused = answer(visit.request, HubAnswer(416, f"Cannot serve {wanted!r} of {entry.size} bytes"))
            refused.headers["Content-Range"] = f"bytes */{entry.size}"
            return refused
        headers["Content-Range"], status = f"bytes {first}-{stop - 1}/{entry.size}", 206
    headers["Content-Length"] = str(stop - first)
    if visit.request.method == "HEAD":
        return Response(status_code=status, headers=headers)
    if path in COUNTED:
        with repository.changing() as meta:
            meta["downloads"] += 1
    if entry.lfs is None:
        return Response(repository.read(entry)[first:stop], status, headers)
    return StreamingResponse(_part(repository.lfs_path(entry.lfs), first, stop), status, headers)


def _span(request: Request, size: int, etag: str) -> tuple[int, int] | None:
    """First and past-the-last byte that a request wants, ``None`` for all of them.

    As the standard allows, headers that ask for several ranges at once or cannot be understood are ignored.
    """
    match = _RANGE.fullmatch(request.headers.get("range", ""))
    first, last = match.groups() if match else ("", "")
    if not (first or last) or request.headers.get("if-range", etag) != etag:
        return None
    if not first:
        return max(size - int(last), 0), size
    if last and int(last) < int(first):
        return None
    return int(first), min(int(last) + 1, size) if last else size


def _part(path: Path, first: int, stop: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(first)
        while first < stop:
            block = file.read(min(_BLOCK, stop - first))
            if not block:
                raise OSError(f"{path} is shorter than it was")
            first += len(block)
            yield block


def _media_type(path: str) -> str:
    name = PurePosixPath(path)
    return _SHOWN.get(name.suffix.lower() or name.name, "application/octet-stream")


def commits(visit: Visit, most: int | None = None) -> list[dict[str, Any]]:
    return [commit_row(commit) for commit in islice(visit.repository.history(visit.commit), most)]


def refs(visit: Visit) -> dict[str, list[dict[str, str]]]:
    kinds = {"refs/heads/": "branches", "refs/convert/": "converts", "refs/tags/": "tags"}
    if visit.query.get("include_prs"):
        kinds["refs/pr/"] = "pullRequests"
    rows: dict[str, list[dict[str, str]]] = {kind: [] for kind in kinds.values()}
    for ref, commit in sorted(visit.repository.refs().items()):
        for prefix, kind in kinds.items():
            if ref.startswith(prefix):
                name = ref if kind == "pullRequests" else ref.removeprefix(prefix)
                rows[kind].append({"name": name, "ref": ref, "targetCommit": commit})
    return rows


def create_branch(visit: Visit) -> None:
    start = visit.writable().resolve(text(visit.body, "startingPoint", "main"))
    visit.repository.add_ref(f"refs/heads/{visit.named['ref']}", start)


def delete_branch(visit: Visit) -> None:
    visit.writable().delete_ref(f"refs/heads/{visit.named['ref']}")


def create_tag(visit: Visit) -> None:
    visit.writable().add_ref(f"refs/tags/{text(visit.body, 'tag')}", visit.commit)


def delete_tag(visit: Visit) -> None:
    visit.writable().delete_ref(f"refs/tags/{visit.named['ref']}")
