"""Pictures say what data they were made of, so that others can check that a card's pictures are of its records."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

#: Keyword of the text in a PNG that holds the digest.
DATA = "focus_hf data"


def digest(data: Any) -> str:
    """SHA-256 of data as JSON."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()


def digest_in(path: Path) -> str | None:
    """The digest in a PNG file, ``None`` if it has none or is no PNG."""
    content = path.read_bytes()
    if not content.startswith(b"\x89PNG\r\n\x1a\n"):
        return None
    place = 8
    while place + 8 <= len(content):
        length, kind = struct.unpack(">I4s", content[place : place + 8])
        keyword, _, text = content[place + 8 : place + 8 + length].partition(b"\0")
        if kind == b"tEXt" and keyword == DATA.encode():
            return text.decode("latin-1")
        place += 12 + length
    return None
