"""One new token of each sequence, in a layer whose heads attend in different ways: all heads in one masked call.

The query heads of a key/value head become its queries, so keys are read once and not repeated; what is read in vain is
cheaper than one call for each head, until the cache is stored by groups (`store`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .head_class import HeadClass
from .mask import WhoAttends, are_near, dense_pairs, share_a_group
from .masked import attend_under_mask
from .problem import Problem

_LAST = slice(-1, None)


def attend_one_query(problem: Problem, classes: Sequence[HeadClass], reads: Tensor | None = None) -> Tensor:
    """Hard Focus attention of single new tokens.

    Args:
        problem: of all heads, ``Q = 1``; its memberships have the columns that the classes name, its own pattern is
            not looked at.
        classes: together they have each key/value head once.
        reads: bool ``(B, 1, columns)``, groups that the new tokens read; by default those that they belong to.

    Returns:
        ``(B, H, 1, D_v)``.
    """
    query, key, who = problem.query, problem.key, problem.who
    repeat = query.shape[1] // key.shape[1]
    mask = _near_or_shared(who, classes, who.memberships[:, _LAST] if reads is None else reads)[:, :, None]
    nothing_else = who.known is not None and who.known.unpadded and who.documents is None and who.extra_mask is None
    if problem.is_plain and problem.scores.sink_logits is None:
        if not nothing_else:
            mask &= dense_pairs(who, _LAST)
        folded = query.unflatten(1, (key.shape[1], repeat)).squeeze(3)
        output = attend_under_mask(folded, key, problem.value, mask, problem.scores, none_empty=nothing_else)
        return output.flatten(1, 2)[:, :, None]
    mask = mask.repeat_interleave(repeat, dim=1) & dense_pairs(who, _LAST)
    return attend_under_mask(query, key, problem.value, mask, problem.scores)


def _near_or_shared(who: WhoAttends, classes: Sequence[HeadClass], reads: Tensor) -> Tensor:
    """Whether the last token of each sequence attends to a token before it: bool ``(B, H_kv, S)``."""
    patterns = {head: some.pattern for some in classes for head in some.kv_heads}
    in_order = [patterns[head] for head in sorted(patterns)]
    windows = _column(tuple(pattern.local_window for pattern in in_order), who.positions)
    starts = tuple(pattern.dense_below for pattern in in_order)
    some_early = max(starts) > _least_position(who)
    dense_below = _column(starts, who.positions) if some_early else None
    last = who.positions[:, None, _LAST]
    pairs = are_near(last, who.positions[:, None], replace(in_order[0], dense_below=0), windows, dense_below)
    for start, width, by_place in _runs(classes):
        some = slice(start, start + width * len(by_place))
        of_query, of_keys = (x[..., some].unflatten(-1, (-1, width)).transpose(1, 2) for x in (reads, who.memberships))
        shared = share_a_group(of_query, of_keys).squeeze(-2)
        if by_place == [(head,) for head in range(len(in_order))]:
            return pairs.logical_or_(shared)
        for place, heads in enumerate(by_place):
            for head in heads:
                pairs[:, head] |= shared[:, place]
    return pairs


def _least_position(who: WhoAttends) -> int:
    """What the last token's position is not below, as far as that is known without a look at it."""
    known = who.known is not None and who.known.unpadded and who.documents is None
    return who.positions.shape[1] - 1 if known else 0


def _runs(classes: Sequence[HeadClass]) -> list[tuple[int, int, list[tuple[int, ...]]]]:
    """Columns of groups that adjoin, looked at together: where they start, groups in each, and whose they are."""
    found = []
    for some in classes:
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


def _column(numbers: tuple[int, ...], like: Tensor) -> Tensor:
    """One number for each key/value head, ``(H_kv, 1)``."""
    return like.new_tensor(numbers)[:, None] if type(like) is not Tensor else _on_device(numbers, like.device)


@functools.cache
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Sent there once: a GPU would be waited for."""
    return torch.tensor(numbers, device=device)[:, None]
