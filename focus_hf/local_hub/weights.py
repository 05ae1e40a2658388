"""How many parameters a repository's safetensors files hold, read from their headers."""

from __future__ import annotations

import json
import math
import re
from functools import partial
from typing import Any

from .changes import Entry
from .lfs import LfsStore
from .repository import Repository

#: A header is at most this long; the format itself allows no more.
MAX_HEADER = 100_000_000

_MODEL = re.compile(r"model(-[0-9]+-of-[0-9]+)?\.safetensors")
_ADAPTER = "adapter_model.safetensors"


def parameters(lfs: LfsStore, repository: Repository, commit: str) -> dict[str, Any] | None:
    """Parameters by dtype and in total, as ``ModelInfo.safetensors`` has them; ``None`` without weights.

    The model's own files count; an adapter's only if there is no model beside it.
    """
    files = repository.files(commit)
    weights = [entry for path, entry in files.items() if _MODEL.fullmatch(path)]
    if not weights and _ADAPTER in files:
        weights = [files[_ADAPTER]]
    by_dtype: dict[str, int] = {}
    for entry in weights:
        counted = repository.remembered(("weights", entry.blob_id), partial(_count, lfs, repository, entry))
        for dtype, count in counted.items():
            by_dtype[dtype] = by_dtype.get(dtype, 0) + count
    return {"parameters": by_dtype, "total": sum(by_dtype.values())} if by_dtype else None


def _count(lfs: LfsStore, repository: Repository, entry: Entry) -> dict[str, int]:
    """Parameters by dtype; empty for a file that is not what its name says."""
    by_dtype: dict[str, int] = {}
    try:
        for name, tensor in json.loads(_header(lfs, repository, entry)).items():
            if name != "__metadata__":
                size = math.prod(int(length) for length in tensor["shape"])
                by_dtype[str(tensor["dtype"])] = by_dtype.get(str(tensor["dtype"]), 0) + size
    except (AttributeError, KeyError, OSError, TypeError, ValueError, RecursionError):
        return {}
    return by_dtype


def _header(lfs: LfsStore, repository: Repository, entry: Entry) -> bytes:
    if entry.lfs is None:
        content = repository.read(entry)
        return content[8 : 8 + int.from_bytes(content[:8], "little")]
    with lfs.path(entry.lfs).open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return file.read(length) if length <= MAX_HEADER else b""
