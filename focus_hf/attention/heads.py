"""Budgets per head: a layer whose key/value heads attend in different ways, each way one problem over its heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .kernels import Kernel
from .mask import Pattern, WhoAttends, attended_pairs
from .paths import focus_attention
from .problem import Problem
from .store import HeadRow

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


def read_classes(numbers: Sequence[int]) -> tuple[HeadClass, ...] | None:
    """What `write_classes` wrote."""
    classes, rest = [], iter(numbers)
    for num_heads in rest:
        heads = tuple(next(rest) for _ in range(num_heads))
        pattern, top_k = Pattern(next(rest), next(rest), next(rest)), next(rest)
        columns = tuple(slice(next(rest), next(rest)) for _ in range(next(rest)))
        classes.append(HeadClass(heads, pattern, columns, top_k))
    return tuple(classes) or None


def head_rows(classes: Sequence[HeadClass]) -> tuple[HeadRow, ...]:
    """What a cache needs to know about each head, by its number (`store.GroupedStore`)."""
    rows: dict[int, HeadRow] = {}
    for some in classes:
        everything = some.pattern.dense_below == EVERYTHING
        row = HeadRow(some.pattern.local_window, forgets=not some.columns and not everything, everything=everything)
        rows |= dict.fromkeys(some.kv_heads, row)
    return tuple(rows[head] for head in sorted(rows))


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


def attend_by_class(
    problem: Problem, classes: Sequence[HeadClass], *, path: str = "auto", kernel: Kernel | None = None
) -> Tensor:
    """Hard Focus attention of a layer whose heads fall into classes.

    Args:
        problem: of all heads. Memberships (and ``reads``) have the columns that the classes name; its own pattern is
            not looked at.
        classes: together they have each key/value head once.
        path, kernel: see `focus_attention`.

    Returns:
        ``(B, H, Q, D_v)``.
    """
    batch, num_heads, num_queries, _ = problem.query.shape
    repeat = num_heads // problem.key.shape[1]
    parts = []
    for some in classes:
        part = _attend_class(problem.select_heads(some.kv_heads), some, path, kernel)
        parts.append(part.unflatten(1, (len(some.kv_heads), repeat)))
    if len(parts) == 1:
        return parts[0].flatten(1, 2)
    by_head = {
        head: part[:, place]
        for some, part in zip(classes, parts, strict=True)
        for place, head in enumerate(some.kv_heads)
    }
    return torch.cat([by_head[head] for head in sorted(by_head)], dim=1)


def _attend_class(problem: Problem, some: HeadClass, path: str, kernel: Kernel | None) -> Tensor:
    known = problem.who.known
    if known is not None and some.top_k:
        known = replace(known, reads_each=some.top_k)
    who = replace(problem.who, pattern=some.pattern, known=known)
    if not some.columns:
        return focus_attention(replace(problem, who=who.without_groups()), path=path, kernel=kernel)
    if len(some.columns) == 1:
        return focus_attention(replace(problem, who=_columns(who, some.columns[0])), path=path, kernel=kernel)
    if problem.is_plain and problem.scores.sink_logits is None:
        memberships = torch.stack([who.memberships[..., c] for c in some.columns], dim=1)
        reads = None if who.reads is None else torch.stack([who.reads[..., c] for c in some.columns], dim=1)
        folded = replace(problem, who=who).fold_heads(memberships, reads)
        output = focus_attention(folded, path=path, kernel=kernel)
        return output.unflatten(0, (-1, len(some.columns))).flatten(1, 2)
    each = (
        _attend_class(problem.select_heads([i]), HeadClass((0,), some.pattern, (columns,), some.top_k), path, kernel)
        for i, columns in enumerate(some.columns)
    )
    return torch.cat(list(each), dim=1)


def _columns(who: WhoAttends, columns: slice) -> WhoAttends:
    reads = None if who.reads is None else who.reads[..., columns]
    return replace(who, memberships=who.memberships[..., columns], reads=reads)


def pairs_by_head(who: WhoAttends, classes: Sequence[HeadClass], chunk: int = 1024) -> Tensor:
    """Pairs attended by each key/value head.

    Args:
        who: the tokens of whole sequences, with the columns that the classes name.
        classes: as for `attend_by_class`.
        chunk: queries looked at together; bounds memory.

    Returns:
        int64, ``(H_kv,)``.
    """
    counts = torch.zeros(sum(len(some.kv_heads) for some in classes), dtype=torch.long)
    for some in classes:
        own = replace(who, pattern=some.pattern)
        views = [_columns(own, c) for c in some.columns] or [own.without_groups()]
        if len(views) == 1:
            views = views * len(some.kv_heads)
        for head, view in zip(some.kv_heads, views, strict=True):
            for start in range(0, who.positions.shape[1], chunk):
                counts[head] += int(attended_pairs(view, slice(start, start + chunk)).sum())
    return counts
