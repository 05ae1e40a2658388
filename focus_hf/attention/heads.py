"""Budgets per head: a layer whose key/value heads attend in different ways, each way one problem over its heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .head_class import HeadClass
from .kernels import Kernel
from .mask import WhoAttends, attended_pairs
from .paths import focus_attention
from .problem import Problem


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
    repeat = problem.query.shape[1] // problem.key.shape[1]
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
