"""One new token of each sequence against keys in plain storage: all heads in one masked call.

Where nothing is hidden and each token is in a known number of groups, `group_numbers` does the same with less.

The query heads of a key/value head become its queries, so keys are read once and not repeated; what is read in vain is
cheaper than one call for each head, until the cache is stored by groups (`store`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from .constants import column, ends_of_rows
from .head_class import EVERYTHING, HeadClass, HeadClasses
from .mask import Pattern, WhoAttends, are_near, dense_pairs, share_a_group
from .masked import attend_under_mask
from .problem import Problem

_LAST = slice(-1, None)


def attend_one_query(
    problem: Problem, classes: Sequence[HeadClass] | None = None, reads: Tensor | None = None
) -> Tensor:
    """Hard Focus attention of single new tokens.

    Args:
        problem: of all heads, ``Q = 1``. With ``classes`` its memberships have the columns that these name, and its
            own pattern is not looked at.
        classes: together they have each key/value head once; ``None`` if all attend alike.
        reads: bool ``(B, 1, columns)``, groups that the new tokens read; by default those that they belong to.

    Returns:
        ``(B, H, 1, D_v)``.
    """
    query, key, who = problem.query, problem.key, problem.who
    batch, heads, _, width = query.shape
    repeat = heads // key.shape[1]
    known = HeadClasses.of(_alike(who, key.shape[1]) if classes is None else classes)
    mask = _near_or_shared(who, known, who.memberships[:, _LAST] if reads is None else reads)[:, :, None]
    nothing_else = _are_in_order(who) and who.extra_mask is None
    if problem.is_plain and problem.scores.sink_logits is None:
        if not nothing_else:
            mask = mask & dense_pairs(who, _LAST)
        folded = query.reshape(batch, key.shape[1], repeat, width)
        output = attend_under_mask(folded, key, problem.value, mask, problem.scores, none_empty=nothing_else)
        return output.reshape(batch, heads, 1, -1)
    if mask.shape[1] > 1:
        mask = mask.repeat_interleave(repeat, dim=1)
    return attend_under_mask(query, key, problem.value, mask & dense_pairs(who, _LAST), problem.scores)


def _alike(who: WhoAttends, kv_heads: int) -> HeadClasses:
    return _one_class(who.pattern, kv_heads, who.memberships.shape[-1])


@functools.cache
def _one_class(pattern: Pattern, kv_heads: int, columns: int) -> HeadClasses:
    return HeadClasses([HeadClass(tuple(range(kv_heads)), pattern, (slice(0, columns),))])


def _are_in_order(who: WhoAttends) -> bool:
    """Whether positions are known to count up through each row."""
    return who.is_plain


def _near_or_shared(who: WhoAttends, classes: HeadClasses, reads: Tensor) -> Tensor:
    """Whether the last token of each sequence attends to a token before it: bool ``(B, H_kv or 1, S)``."""
    near, sinks = _near(who, classes.patterns)
    heads, pairs = len(classes.patterns), None
    all_heads = list(range(heads))
    for start, width, by_place in classes.runs:
        some = slice(start, start + width * len(by_place))
        shared = share_a_group(*(_by_place(x[..., some], width) for x in (reads, who.memberships))).squeeze(-2)
        if by_place == [tuple(all_heads)] or by_place == [(head,) for head in all_heads]:
            pairs = shared | near
            break
        pairs = near.expand(shared.shape[0], heads, -1).clone() if pairs is None else pairs
        for place, own in enumerate(by_place):
            for head in own:
                pairs[:, head] |= shared[:, place]
    if pairs is None:
        pairs = near.expand(reads.shape[0], -1, -1).clone()
    if sinks:
        pairs[..., :sinks] = True
    return pairs


def _by_place(columns: Tensor, width: int) -> Tensor:
    """``(B, N, places * K)`` to ``(B, places, N, K)``."""
    return columns.unflatten(-1, (-1, width)).transpose(1, 2)


def _near(who: WhoAttends, patterns: Sequence[Pattern]) -> tuple[Tensor, int]:
    """Whether the last token attends to one before it whatever the groups.

    Args:
        who: the tokens.
        patterns: of each key/value head.

    Returns:
        bool ``(B or 1, H_kv or 1, S)``, not to be written to, and how many tokens at the start of rows are sinks
        beside that.
    """
    positions = who.positions
    if _are_in_order(who):
        assert who.known is not None
        first, length = who.known.first_position, positions.shape[1]
        last = first + length - 1
        reach = [EVERYTHING if last < pattern.dense_below else pattern.local_window for pattern in patterns]
        alike = all(window == reach[0] for window in reach)
        near = ends_of_rows(tuple(w + 1 for w in (reach[:1] if alike else reach)), length, positions)
        return near[None], max(0, patterns[0].sink_tokens - first)
    windows = column(tuple(pattern.local_window for pattern in patterns), positions)
    starts = tuple(pattern.dense_below for pattern in patterns)
    dense_below = column(starts, positions) if any(starts) else None
    same = replace(patterns[0], dense_below=0)
    return are_near(positions[:, None, _LAST], positions[:, None], same, windows, dense_below), 0
