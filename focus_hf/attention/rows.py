"""Ragged rows: what one kernel call works on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Row ``r`` has the queries ``query_offsets[r] : query_offsets[r + 1]`` and the keys alike.

    The queries of a row are its *last* tokens: causal attention in a row is aligned at the bottom right.
    """

    query_offsets: tuple[int, ...]
    key_offsets: tuple[int, ...]
    device: torch.device

    def lengths(self) -> Iterator[tuple[slice, slice]]:
        """The query slice and the key slice of each row."""
        for row in range(len(self.query_offsets) - 1):
            yield (
                slice(self.query_offsets[row], self.query_offsets[row + 1]),
                slice(self.key_offsets[row], self.key_offsets[row + 1]),
            )

    @cached_property
    def cu_queries(self) -> Tensor:
        """Query offsets as kernels take them: int32 ``(R + 1,)`` on the device."""
        return torch.tensor(self.query_offsets, dtype=torch.int32, device=self.device)

    @cached_property
    def cu_keys(self) -> Tensor:
        """Key offsets, likewise."""
        return torch.tensor(self.key_offsets, dtype=torch.int32, device=self.device)

    @property
    def longest_query(self) -> int:
        return max(q.stop - q.start for q, _ in self.lengths())

    @property
    def longest_key(self) -> int:
        return max(k.stop - k.start for _, k in self.lengths())

    @classmethod
    def single(cls, queries: int, keys: int, device: torch.device) -> Rows:
        """One row."""
        return cls((0, queries), (0, keys), device)
