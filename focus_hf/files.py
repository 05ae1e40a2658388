"""Writing files so that nothing is ever half there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, then rename it: readers see the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:  # it names a file that nobody asked for
        raise type(error)(error.errno, error.strerror, str(path)) from None
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
