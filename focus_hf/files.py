"""Writing files so that nothing is ever half there; where the templates of pages and cards are."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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


def save_figure(figure: Any, path: Path, data: Mapping[str, str] | None = None, **how: Any) -> Path:
    """Write a matplotlib figure as PNG with some data in it, on a white ground: readable on a dark page, too."""
    content = io.BytesIO()
    figure.savefig(content, format="png", facecolor="white", metadata={"Software": None, **(data or {})}, **how)
    write_atomically(path, content.getvalue())
    return path


def template_folder() -> Path:
    """``hub_templates``: inside an installed package, beside it in a source checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "hub_templates"
    return installed if installed.is_dir() else package.parent / "hub_templates"
