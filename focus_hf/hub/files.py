"""Which files belong to an adapter: of a folder on this machine, and of a repository on the Hub."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from pathlib import Path

from ..records.adapter_files import ADAPTER_FILES, CONFIG_FILE, RESULTS_FILE
from .errors import HubError

#: Files of an adapter: a figure for each kind of diagram and layer, at the very most.
MOST_FILES = 500

#: Bytes of a file: configurations have one or two thousand, results and cards with every benchmark some hundred
#: thousand, reports on a hundred layers and large figures some millions.
LARGEST_FILE = 64 * 1024 * 1024
LARGEST = {CONFIG_FILE: 1024 * 1024, RESULTS_FILE: 8 * 1024 * 1024, "README.md": 4 * 1024 * 1024}

#: Names that are the same file on every system; no part of them leads elsewhere or means a device.
_NAME = re.compile(r"(figures/)?[^\W_][\w. +()-]{0,200}")
_DEVICE = re.compile(r"(con|prn|aux|nul|(com|lpt)[0-9])\b", re.IGNORECASE)


def adapter_files(folder: Path) -> list[str]:
    """Files of a folder that belong to an adapter.

    Links may lead to files of the folder itself, or, in the Hub's cache, to where it keeps contents; others could lead
    anywhere and are left out.
    """
    repository = folder.resolve().parent.parent
    homes = [folder.resolve(), repository / "blobs", repository.parent / "blobs"]
    found = [path for path in folder.rglob("*") if path.is_file() and any(_is_in(path, home) for home in homes)]
    return sorted(filter(_belongs, (path.relative_to(folder).as_posix() for path in found)))


def remote_files(names: Iterable[str], source: str) -> list[str]:
    """Names in a repository's listing that belong to an adapter and can be a file on any machine.

    Raises:
        HubError: they are more than an adapter has.
    """
    found = [name for name in names if _belongs(name) and _is_plain(name)]
    if len(found) > MOST_FILES:
        raise HubError(f"{source} lists {len(found):,} files of an adapter, more than {MOST_FILES}: it is not read.")
    return sorted(found)


def _belongs(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in ADAPTER_FILES)


def _is_plain(name: str) -> bool:
    last = name.rpartition("/")[2]
    return _NAME.fullmatch(name) is not None and not _DEVICE.match(last)


def _is_in(path: Path, home: Path) -> bool:
    return path.resolve().is_relative_to(home)
