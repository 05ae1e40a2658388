"""Ragged rows: what one kernel call works on, and which tokens they are."""

from __future__ import annotations

import itertools
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


@dataclass(frozen=True)
class Part:
    """A part of the attended pairs: rows, and the tokens in them.

    Args:
        queries: indices of the rows' queries into the flat queries of the call; a slice where they are adjacent.
        keys: likewise into the flat keys.
        rows: where each row begins and ends in the two.
        exclude: ``(queries, K)`` and ``(keys, K)`` bool: a pair is left out if both have some column set.
        repeated: ``(queries,)`` bool: queries that have the same keys in another row, and count there.
    """

    queries: Tensor | slice
    keys: Tensor | slice
    rows: Rows
    exclude: tuple[Tensor, Tensor] | None = None
    repeated: Tensor | None = None

    def split(self) -> Iterator[Part]:
        """One part for each row that has queries."""
        for q, k in self.rows.lengths():
            if q.stop > q.start:
                rows = Rows.single(q.stop - q.start, k.stop - k.start, self.rows.device)
                repeated = None if self.repeated is None else self.repeated[q]
                yield Part(
                    _sub(self.queries, q),
                    _sub(self.keys, k),
                    rows,
                    _pair(self.exclude, q, k),
                    repeated,
                )

    def split_window(self, local_window: int, max_queries: int) -> Iterator[Part]:
        """For a sliding window: one part for each ``max_queries`` queries of a row, with the keys they can see.

        The first queries of a row, which see fewer keys than the others, are a part of their own.
        """
        for q, k in self.rows.lengths():
            earlier = (k.stop - k.start) - (q.stop - q.start)
            first_part = q.start + max(0, local_window - earlier)
            starts = [q.start, *range(first_part, q.stop, max_queries)]
            for start, stop in itertools.pairwise([*starts, q.stop]):
                if start == stop:
                    continue
                first = k.start + max(0, earlier + start - q.start - local_window)
                some_q, some_k = slice(start, stop), slice(first, k.start + earlier + stop - q.start)
                rows = Rows.single(stop - start, some_k.stop - first, self.rows.device)
                exclude = _pair(self.exclude, some_q, some_k)
                yield Part(_sub(self.queries, some_q), _sub(self.keys, some_k), rows, exclude)


def _sub(index: Tensor | slice, part: slice) -> Tensor | slice:
    if isinstance(index, slice):
        return slice(index.start + part.start, index.start + part.stop)
    return index[part]


def _pair(both: tuple[Tensor, Tensor] | None, q: slice, k: slice) -> tuple[Tensor, Tensor] | None:
    return None if both is None else (both[0][q], both[1][k])


def take(tokens: Tensor, index: Tensor | slice) -> Tensor:
    """The tokens (first dimension) at these indices; a view for a slice."""
    return tokens[index] if isinstance(index, slice) else tokens.index_select(0, index)
