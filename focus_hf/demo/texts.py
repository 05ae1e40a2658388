"""What the demo reads: a text to train on and one to measure on, as files, so that others can measure again."""

from __future__ import annotations

import os
from pathlib import Path

from ..files import write_atomically
from ..texts import Texts, TextSource
from .tiny_base import python_topics

#: Share of a text of one's own that is kept for measuring.
_HELD_OUT = 0.1


def write_texts(text: str | os.PathLike[str] | None, out: Path) -> tuple[Texts, Texts]:
    """Training text and held-out text, each from a file of its own in ``out``.

    Args:
        text: a text file; by default the documentation that every Python ships, whose every eighth topic is held out.
        out: folder of the demo.

    Raises:
        ValueError: the file holds no UTF-8 text.
    """
    if text is None:
        name, parts = "python-docs", python_topics()
    else:
        (whole,) = TextSource((str(text),)).load().documents
        keep = int(len(whole) * (1 - _HELD_OUT))
        name, parts = Path(text).stem, (whole[:keep], whole[keep:])
    loaded = []
    for which, part in zip(("train", "held-out"), parts, strict=True):
        path = out / f"{name}-{which}.txt"
        write_atomically(path, part.encode())
        loaded.append(TextSource((str(path),)).load())
    return loaded[0], loaded[1]
