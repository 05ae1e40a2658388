"""Files that are not complete yet: nothing under its final name is ever half there."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from .locks import fcntl


class Staging:
    """A folder for what this process is about to move into place.

    What processes that died left behind is removed by the next one to start.

    Args:
        root: shared by all processes; on the same disk as the final places.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        everybody = os.open(root / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(everybody, wait=True)
            for folder in root.glob("process-*"):
                _remove_if_abandoned(folder)
            self.folder = Path(tempfile.mkdtemp(prefix="process-", dir=root))
            # Open, and so locked, for as long as this process lives.
            self._mine = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
            _lock(self._mine, wait=True)
        finally:
            os.close(everybody)

    def new_file(self) -> Path:
        handle, path = tempfile.mkstemp(dir=self.folder)
        os.close(handle)
        os.chmod(path, 0o644)
        return Path(path)

    def new_folder(self) -> Path:
        path = Path(tempfile.mkdtemp(dir=self.folder))
        os.chmod(path, 0o755)
        return path

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._mine)


def _lock(file: int, *, wait: bool) -> bool:
    if fcntl is None:
        return wait
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def _remove_if_abandoned(folder: Path) -> None:
    try:
        file = os.open(folder / "lock", os.O_RDWR)
    except FileNotFoundError:  # died before it made its lock
        shutil.rmtree(folder, ignore_errors=True)
        return
    try:
        if _lock(file, wait=False):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(file)
