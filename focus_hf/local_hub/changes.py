"""Files of a commit, and what another commit does to them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from .errors import HubAnswer

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {size}\n"
_POINTER = re.compile(LFS_POINTER.format(oid="([0-9a-f]{64})", size="([0-9]{1,18})").encode())


@dataclass(frozen=True)
class Entry:
    """One file of a commit; ``lfs`` holds the sha256 of the content if git holds only a pointer to it."""

    path: str
    blob_id: str
    size: int
    lfs: str | None = None


@dataclass
class Changes:
    """What a commit does: blob by path (``None`` deletes), and folders to delete before that."""

    files: dict[str, str | None] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)


def read_pointer(data: bytes) -> tuple[str, int] | None:
    """sha256 and size that an LFS pointer names; ``None`` for any other content."""
    match = _POINTER.fullmatch(data) if len(data) <= 200 else None
    return (match[1].decode(), int(match[2])) if match else None


def folders_of(paths: Iterable[str]) -> set[str]:
    """Every folder that holds a file, or a folder that does."""
    folders = {path.rpartition("/")[0] for path in paths}
    return folders | {f[:i] for f in folders for i, c in enumerate(f) if c == "/"}


def apply_changes(changes: Changes, kept: dict[str, str]) -> None:
    """Change a listing of files in place."""
    for folder in changes.folders:
        inside = [path for path in kept if path.startswith(folder.rstrip("/") + "/")]
        if not inside:
            raise HubAnswer(404, f"Entry not found: {folder}", code="EntryNotFound")
        for path in inside:
            del kept[path]
    for path, blob in changes.files.items():
        if blob is not None:
            kept[path] = blob
        elif kept.pop(path, None) is None:
            raise HubAnswer(404, f"Entry not found: {path}", code="EntryNotFound")
    for path in changes.files:
        parts = path.split("/")
        taken = next((f for f in ("/".join(parts[:n]) for n in range(1, len(parts))) if f in kept), None)
        if taken and path in kept:
            raise HubAnswer(400, f"{path} cannot be added: {taken} is a file, not a folder")
    folders = folders_of(kept)
    for path in changes.files:
        if path in kept and path in folders:
            raise HubAnswer(400, f"{path} cannot be added: it is a folder, not a file")
