"""Classes of key/value heads that attend alike, and which columns of a layer's memberships are whose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .mask import Pattern

#: A ``dense_below`` that no position reaches: such heads attend to everything.
EVERYTHING = 2**31


@dataclass(frozen=True)
class HeadClass:
    """Key/value heads of a layer that attend alike.

    Args:
        kv_heads: which, ascending.
        pattern: their window, sinks and dense start; with ``dense_below=EVERYTHING`` they attend to everything.
        columns: where their groups stand among the columns of the layer's memberships: one slice for all of them, or
            one for each, of equal lengths; empty for window and sinks alone.
        top_k: groups that each of their queries reads, where it reads others than it belongs to; 0 if that is not
            known.
    """

    kv_heads: tuple[int, ...]
    pattern: Pattern
    columns: tuple[slice, ...] = ()
    top_k: int = 0


class HeadClasses(tuple[HeadClass, ...]):
    """The classes of a layer's heads: together they have each key/value head once.

    A tuple that works out once what follows from it, since every layer asks at every token.
    """

    @classmethod
    def of(cls, classes: Sequence[HeadClass]) -> HeadClasses:
        """Any classes as these."""
        return classes if isinstance(classes, cls) else cls(classes)

    @cached_property
    def patterns(self) -> tuple[Pattern, ...]:
        """Of each key/value head, by its number."""
        by_head = {head: some.pattern for some in self for head in some.kv_heads}
        return tuple(by_head[head] for head in sorted(by_head))

    @cached_property
    def rows(self) -> tuple[HeadRow, ...]:
        """What a cache needs to know about each head, by its number."""
        rows: dict[int, HeadRow] = {}
        for some in self:
            everything = some.pattern.dense_below == EVERYTHING
            row = HeadRow(
                some.pattern.local_window, forgets=not some.columns and not everything, everything=everything
            )
            rows |= dict.fromkeys(some.kv_heads, row)
        return tuple(rows[head] for head in sorted(rows))

    @cached_property
    def dense_length(self) -> int:
        """Sequences of at most this many tokens are dense attention in all heads."""
        return min(pattern.dense_length for pattern in self.patterns)

    @cached_property
    def runs(self) -> list[tuple[int, int, list[tuple[int, ...]]]]:
        """Columns of groups that adjoin: where they start, groups in each, and the heads whose they are."""
        found = []
        for some in self:
            heads = [some.kv_heads] if len(some.columns) == 1 else [(head,) for head in some.kv_heads]
            found += [(columns.start, columns.stop, own) for columns, own in zip(some.columns, heads, strict=False)]
        runs: list[tuple[int, int, list[tuple[int, ...]]]] = []
        for start, stop, own in sorted(found):
            first, width, by_place = runs[-1] if runs else (0, 0, [])
            if width == stop - start and first + width * len(by_place) == start:
                by_place.append(own)
            else:
                runs.append((start, stop - start, [own]))
        return runs


@dataclass(frozen=True)
class HeadRow:
    """How a key/value head attends that is a row of its own.

    Args:
        local_window: its window.
        forgets: it needs nothing beyond its window (and sinks, and dense start).
        everything: its tokens are in all groups.
    """

    local_window: int
    forgets: bool = False
    everything: bool = False


def write_classes(classes: Sequence[HeadClass] | None) -> list[int]:
    """Classes as integers, for operations that take no other values; see `read_classes`."""
    numbers: list[int] = []
    for some in classes or ():
        numbers += [len(some.kv_heads), *some.kv_heads]
        pattern = some.pattern
        numbers += [pattern.local_window, pattern.sink_tokens, pattern.dense_below, some.top_k, len(some.columns)]
        for columns in some.columns:
            numbers += [columns.start, columns.stop]
    return numbers


def read_classes(numbers: Sequence[int]) -> HeadClasses | None:
    """What `write_classes` wrote."""
    classes, rest = [], iter(numbers)
    for num_heads in rest:
        heads = tuple(next(rest) for _ in range(num_heads))
        pattern, top_k = Pattern(next(rest), next(rest), next(rest)), next(rest)
        columns = tuple(slice(next(rest), next(rest)) for _ in range(next(rest)))
        classes.append(HeadClass(heads, pattern, columns, top_k))
    return HeadClasses(classes) if classes else None


def head_rows(classes: Sequence[HeadClass]) -> tuple[HeadRow, ...]:
    """What a cache needs to know about each head, by its number (`store.GroupedStore`)."""
    return HeadClasses.of(classes).rows


def groups_per_head(classes: Sequence[HeadClass]) -> int:
    """``K``, or 1 where no head has groups."""
    return max((columns.stop - columns.start for some in classes for columns in some.columns), default=1)


def columns_by_head(classes: Sequence[HeadClass]) -> dict[int, slice]:
    """Which columns of memberships are those of each head that has groups."""
    return {
        head: some.columns[place if len(some.columns) > 1 else 0]
        for some in classes
        if some.columns
        for place, head in enumerate(some.kv_heads)
    }


def memberships_of_rows(columns: Tensor, classes: Sequence[HeadClass]) -> Tensor:
    """Groups ``(B, T, columns)`` of all classes to those of each head of each sequence, ``(B * H_kv, T, K)``.

    Heads that attend to everything are in all groups, those with a window only are in none.
    """
    own, width = columns_by_head(classes), groups_per_head(classes)
    rows = head_rows(classes)
    none = every = columns[..., :0]
    if len(own) < len(rows):
        none = columns.new_zeros(*columns.shape[:2], width)
        every = ~none
    heads = [
        columns[..., own[head]] if head in own else every if row.everything else none for head, row in enumerate(rows)
    ]
    return torch.stack(heads, dim=1).flatten(0, 1)


def memberships_of_columns(rows: Tensor, classes: Sequence[HeadClass], width: int) -> Tensor:
    """What `memberships_of_rows` was made of, ``(B, T, width)``; columns of no head are all ``True``."""
    heads = len(head_rows(classes))
    by_head = rows.unflatten(0, (-1, heads))
    columns = rows.new_ones(by_head.shape[0], rows.shape[1], width)
    for head, own in columns_by_head(classes).items():
        columns[..., own] = by_head[:, head]
    return columns
