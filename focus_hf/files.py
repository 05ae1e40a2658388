"""Writing files so that nothing is ever half there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def written_atomically(path: Path) -> Iterator[BinaryIO]:
    """A file to write to under a temporary name, renamed when the block ends, or removed if it fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:  # it names a file that nobody asked for
        raise type(error)(error.errno, error.strerror, str(path)) from None
    os.close(handle)
    try:
        with open(partial, "wb") as file:
            yield file
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, then rename it: readers see the old content or the new, never a part."""
    with written_atomically(path) as file:
        file.write(content)
