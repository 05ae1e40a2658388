"""One writer at a time, among threads and among processes, and tidying up after one that died."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: one server at a time is up to the user there
    fcntl = None  # type: ignore[assignment]


class WriteLock:
    """A lock that the operating system gives back when its holder dies.

    Its file names the folder that is written to for as long as somebody does; a name that is found there is that of a
    writer that died in the middle, and what it left is removed.

    Args:
        path: of the file, in a folder above all that are written to.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._threads = threading.RLock()
        self._held = False

    @contextmanager
    def held(self, folder: Path) -> Iterator[None]:
        """Write to a folder inside the block; a thread that has the lock may take it again."""
        with self._threads:
            if self._held:
                yield
                return
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                claim(file)
                if left := os.read(file, 4096):
                    _tidy(self._path.parent / os.fsdecode(left))
                    os.ftruncate(file, 0)
                    os.lseek(file, 0, os.SEEK_SET)
                os.write(file, os.fsencode(folder.relative_to(self._path.parent)))
                self._held = True
                try:
                    yield
                except OSError:  # a full disk can leave behind what a writer that died does
                    _tidy(folder)
                    raise
                finally:
                    self._held = False
                    os.ftruncate(file, 0)
            finally:
                os.close(file)


def _tidy(folder: Path) -> None:
    """Remove unfinished files of a writer: git's, and those of `write_atomically`."""
    for pattern in ("**/*.lock", ".*.json.*"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def claim(file: int, *, wait: bool = True) -> bool:
    """Lock an open file for as long as it is open; ``False`` if another process has it and we do not wait."""
    if fcntl is None:
        return wait
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True
