"""Pictures say what data they were made of, so that others can check that a card's pictures are of its records."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

#: Keyword of the text in a PNG that holds the digest.
DATA = "focus_hf data"


def digest(data: Any) -> str:
    """SHA-256 of data as JSON."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()


def digest_in(path: Path) -> str | None:
    """The digest in a PNG file, ``None`` if it has none."""
    found = re.search(rb"tEXt%s\0([0-9a-f]{64})" % DATA.encode(), path.read_bytes())
    return found[1].decode() if found else None
