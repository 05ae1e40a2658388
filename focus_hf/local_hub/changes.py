"""Files of a commit, what another commit does to them, and which names they may have."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dulwich.index import validate_path_element_hfs, validate_path_element_ntfs

from .http import HubAnswer, no_entry

#: Folders inside one another: every command that walks a tree walks all of them for every file.
MAX_PATH_DEPTH = 64

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {size}\n"
_POINTER = re.compile(LFS_POINTER.format(oid="([0-9a-f]{64})", size="([0-9]{1,18})").encode())

#: Names of devices on Windows, with any ending: a file of that name cannot be downloaded there.
_DEVICE = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³]) *(\..*)?", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class Entry:
    """One file of a commit; ``lfs`` holds the sha256 of the content if git holds only a pointer to it."""

    blob_id: str
    size: int
    lfs: str | None = None

    def facts(self) -> dict[str, Any]:
        """Size and hashes, in the names of the Hub's JSON."""
        facts: dict[str, Any] = {"size": self.size, "blobId": self.blob_id, "oid": self.blob_id}
        if self.lfs is not None:
            facts["lfs"] = {"oid": self.lfs, "sha256": self.lfs, "size": self.size, "pointerSize": 134}
        return facts


@dataclass
class Changes:
    """What a commit does: blob by path (``None`` deletes), and folders to delete before that."""

    files: dict[str, str | None] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)

    def apply(self, kept: dict[str, str]) -> None:
        """Change a listing of files, blob by path, in place."""
        for folder in self.folders:
            inside = [path for path in kept if path.startswith(f"{folder}/")]
            if not inside:
                raise no_entry(folder)
            for path in inside:
                del kept[path]
        for path, blob in self.files.items():
            if blob is not None:
                kept[path] = blob
            elif kept.pop(path, None) is None:
                raise no_entry(path)
        folders = folders_of(kept)
        for path in self.files.keys() & kept.keys():
            if taken := next((folder for folder in folders_of([path]) if folder in kept), None):
                raise HubAnswer(400, f"{path} cannot be added: {taken} is a file, not a folder")
            if path in folders:
                raise HubAnswer(400, f"{path} cannot be added: it is a folder, not a file")


def read_pointer(data: bytes) -> tuple[str, int] | None:
    """sha256 and size that an LFS pointer names; ``None`` for any other content."""
    match = _POINTER.fullmatch(data) if len(data) <= 200 else None
    return (match[1].decode(), int(match[2])) if match else None


def folders_of(paths: Iterable[str]) -> set[str]:
    """Every folder that holds a file, or a folder that does."""
    folders = {path.rpartition("/")[0] for path in paths}
    return folders | {f[:i] for f in folders for i, c in enumerate(f) if c == "/"}


def check_path(path: str) -> str:
    """A path as a file of a repository may have.

    Raises:
        HubAnswer: 400 if it could leave the folder it is cloned or downloaded to, or be mistaken for git's own.
    """
    path = path.rstrip("/")
    parts = path.split("/")
    if odd := next((part for part in parts if not _is_portable(part)), None):
        raise HubAnswer(
            400,
            f"Invalid path in repository: {odd[:300]!a} is no name of a file on every system: leave out control "
            "characters, characters that change the direction of text, colons, and a dot or space at the end.",
        )
    if len(parts) > MAX_PATH_DEPTH + 1 or len(path.encode()) > 4096 or not all(map(_is_sound, parts)):
        raise HubAnswer(400, f"Invalid path in repository: {path[:300]!r}")
    return path


def _is_portable(name: str) -> bool:
    """Whether a name can be seen for what it is, and kept as it is.

    Windows drops dots and spaces at its end, and takes what stands before a colon for a drive or a file.
    """
    return name in (".", "..") or (name.isprintable() and name[-1:] not in (".", " ") and ":" not in name)


def _is_sound(name: str) -> bool:
    """Whether a name leads nowhere else, and to nothing of git's or of the system's."""
    raw = name.encode()
    protected = validate_path_element_ntfs(raw) and validate_path_element_hfs(raw)
    return protected and 0 < len(raw) <= 255 and "\\" not in name and not is_device(name)


def is_device(name: str) -> bool:
    """Whether Windows takes a file's name for a device of its own, such as ``NUL`` or ``com1.txt``."""
    return _DEVICE.fullmatch(name) is not None
