"""Names of files that every system can hold, and that lead nowhere else."""

from __future__ import annotations

import re

from dulwich.index import validate_path, validate_path_element_hfs, validate_path_element_ntfs

from .errors import HubAnswer

#: Folders inside one another: every command that walks a tree walks all of them for every file.
MAX_PATH_DEPTH = 64

#: Names of devices on Windows, with any ending: a file of that name cannot be downloaded there.
_DEVICE = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³]) *(\..*)?", re.IGNORECASE | re.DOTALL)


def check_path(path: str) -> str:
    """A path as a file of a repository may have.

    Raises:
        HubAnswer: 400 if it could leave the folder it is cloned or downloaded to, or be mistaken for git's own.
    """
    raw = path.rstrip("/").encode()
    if odd := next((part for part in path.split("/") if not _is_portable(part)), None):
        raise HubAnswer(
            400,
            f"Invalid path in repository: {odd[:300]!a} is no name of a file on every system: leave out control "
            "characters, characters that change the direction of text, colons, and a dot or space at the end.",
        )
    sound = (
        validate_path(raw, validate_path_element_ntfs)
        and validate_path(raw, validate_path_element_hfs)
        and all(part and len(part) <= 255 for part in raw.split(b"/"))
        and len(raw) <= 4096
        and not re.search(rb"[\x00-\x1f\x7f\\]", raw)
        and raw.count(b"/") <= MAX_PATH_DEPTH
        and not any(is_device(part) for part in path.split("/"))
    )
    if not sound:
        raise HubAnswer(400, f"Invalid path in repository: {path[:300]!r}")
    return path.rstrip("/")


def _is_portable(name: str) -> bool:
    """Whether a name can be seen for what it is, and kept as it is.

    Windows drops dots and spaces at its end, and takes what stands before a colon for a drive or a file.
    """
    return name in (".", "..") or (name.isprintable() and name[-1:] not in (".", " ") and ":" not in name)


def is_device(name: str) -> bool:
    """Whether Windows takes a file's name for a device of its own, such as ``NUL`` or ``com1.txt``."""
    return _DEVICE.fullmatch(name) is not None
