"""One writer at a time, among threads and among processes, and tidying up after one that died."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import HubAnswer

try:
    import fcntl
except ImportError:  # Windows: one server at a time is up to the user there
    fcntl = None  # type: ignore[assignment]


class Gone(HubAnswer):
    """The repository was deleted since the request found it."""

    def __init__(self) -> None:
        super().__init__(404, "Repository not found", code="RepoNotFound")


class WriteLock:
    """A lock that the operating system gives back when its holder dies.

    Args:
        path: a file for the lock alone; it holds a mark as long as somebody writes.
        tidy: called before writing when the last writer died in the middle, to remove what it left.
    """

    def __init__(self, path: Path, tidy: Callable[[], None]) -> None:
        self._path, self._tidy = path, tidy
        self._threads = threading.RLock()
        self._depth = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock inside the block; a thread that has it may take it again."""
        with self._threads:
            if self._depth:
                yield
                return
            file = self._open()
            try:
                if os.fstat(file).st_size:
                    self._tidy()
                os.write(file, b"writing")
                self._depth = 1
                try:
                    yield
                except OSError:  # a full disk can leave behind what a writer that died does
                    self._tidy()
                    raise
                finally:
                    self._depth = 0
                    os.ftruncate(file, 0)
            finally:
                os.close(file)

    def _open(self) -> int:
        """The lock's file, locked, unless what it guards was deleted while we waited."""
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            raise Gone from None
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
            if self._path.exists() and os.path.samestat(os.fstat(file), os.stat(self._path)):
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)
        raise Gone
