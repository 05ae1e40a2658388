"""A recorded sample of tokens with their groups: by it, others see that an adapter routes for them as it did here."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..files import write_atomically
from .adapter_files import SAMPLE_FILE, AdapterFileError, read_json
from .typed import check_types

SCHEMA = 1


@dataclass(frozen=True)
class TokenSample:
    """Tokens, and the first group of each in every layer.

    Args:
        ids: token ids.
        groups: for each attention module (or head of one, where heads route by themselves) its tokens' groups.
        top_k: of the adapter when it was recorded.
        weights_sha256: of the adapter.
        reads: for each head that routes by itself, how many cells each token reads.
        schema: version of the file's format.
    """

    ids: list[int]
    groups: dict[str, list[int]]
    top_k: int
    weights_sha256: str = ""
    reads: dict[str, list[int]] = field(default_factory=dict)
    schema: int = SCHEMA

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``focus_sample.json`` into an adapter's folder."""
        text = json.dumps(asdict(self), separators=(",", ":")) + "\n"
        write_atomically(Path(folder) / SAMPLE_FILE, text.encode())

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> TokenSample | None:
        """Read it from an adapter's folder; ``None`` if there is none, `AdapterFileError` if it cannot be read."""
        path = Path(folder) / SAMPLE_FILE
        if not path.is_file():
            return None
        try:
            sample = cls(**read_json(path))
            check_types(sample)
            lengths = {len(sample.ids), *map(len, sample.groups.values()), *map(len, sample.reads.values())}
            if sample.schema > SCHEMA or len(lengths) != 1:
                raise ValueError("its lists do not fit together, or it was written by a newer focus_hf")
        except (TypeError, ValueError) as error:
            raise AdapterFileError(f"{path} cannot be read ({error}); record it again.") from None
        return sample


def same_groups(one: TokenSample, other: TokenSample) -> float:
    """Share of tokens and layers that are in the same group; 0 where the layers differ."""
    if one.groups.keys() != other.groups.keys():
        return 0.0
    pairs = [pair for name, groups in one.groups.items() for pair in zip(groups, other.groups[name], strict=True)]
    return sum(a == b for a, b in pairs) / max(1, len(pairs))
