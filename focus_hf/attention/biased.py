"""Hard Focus attention as dense attention under a bias: for short sequences and heavy groups, on CPU.

Where most pairs are attended there is little to skip, and one causal call of the flash kernel that adds a bias to
its scores costs hardly more than dense attention. A query's row of the bias depends on its groups alone, but for the
window: so there is one row for each combination of groups, and the rows of a block of queries are copies of these.
Where queries read other groups than they belong to there are about as many combinations as queries; then there is one
column for each group of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.profiler import record_function

from .kernels import cpu_flash
from .mask import PADDING, WhoAttends, share_a_group
from .merge import merge
from .plan import sequences
from .problem import Problem
from .rows import take
from .scratch import scratch

#: Numbers in one bias tensor, which as many queries share as fit, but not fewer than `MIN_QUERIES`.
BIAS_SIZE = 2**22

#: The kernel is fastest from 768 queries on.
MIN_QUERIES = 1024

#: Rows of a bias that are made together from its columns.
ROWS = 256


def biased_focus_attention(problem: Problem) -> Tensor:
    """Hard Focus attention under a bias. Inference on CPU, without sink logits.

    Returns:
        As `grouped_focus_attention`.
    """
    who, scale = problem.who, problem.scores.scale
    batch, num_heads, num_queries, _ = problem.query.shape
    output = problem.query.new_empty(batch, num_queries, num_heads, problem.value.shape[-1])
    if who.documents is not None or not bool((who.positions != PADDING).all()):
        output.zero_()  # padding
    q, k, v = (x.transpose(1, 2) for x in (problem.query, problem.key, problem.value))
    for row, tokens, queries in sequences(who, num_queries):
        some = take(q[row], queries), take(k[row], tokens), take(v[row], tokens)
        into = output[row, queries]  # a view of the output, if its tokens are adjacent
        with record_function("focus: plan"):
            fill = _how_to_fill(who, row, tokens, some[0].shape[0], problem.query.dtype)
        _sequence(*some, fill, who.pattern.local_window, scale, into)
        if not isinstance(queries, slice):
            output[row, queries] = into
    return output.transpose(1, 2)


#: Writes what groups add to the scores of adjacent queries, ``(Q, S)``, given the first one's place among the ``S``.
Fill = Callable[[Tensor, int], None]


def _sequence(
    query: Tensor, key: Tensor, value: Tensor, fill: Fill, local_window: int, scale: float, output: Tensor
) -> None:
    """One document without padding: ``(Q, H, D)`` against ``(S, H_kv, D)``, the last of which are the queries'."""
    num_queries, num_keys = query.shape[0], key.shape[0]
    earlier, block = num_keys - num_queries, max(MIN_QUERIES, BIAS_SIZE // num_keys)
    memory = scratch("bias", min(block, num_queries) * num_keys, like=query)
    for start in range(0, num_queries, block):
        stop = min(start + block, num_queries)
        first, new = earlier + start, slice(earlier + start, earlier + stop)
        with record_function("focus: plan"):
            bias = memory[: (stop - start) * new.stop].view(stop - start, new.stop)
            fill(bias, first)
            _open_window(bias, first, local_window)
        with record_function("focus: groups"):
            some = query[start:stop]
            part = cpu_flash(some, key[new], value[new], scale, causal=True, bias=bias[None, None, :, new])
            if first:
                before = cpu_flash(some, key[:first], value[:first], scale, bias=bias[None, None, :, :first])
                part = merge(*part, *before)
            output[start:stop] = part[0]


def _how_to_fill(who: WhoAttends, row: int, tokens: Tensor | slice, num_queries: int, dtype: torch.dtype) -> Fill:
    """Of a document, the last ``num_queries`` of whose tokens are the queries; their places count up by one."""
    pattern, place = who.pattern, take(who.positions[row], tokens)
    groups = take(who.memberships[row], tokens)
    is_sink, is_early = place < pattern.sink_tokens, place < pattern.dense_below
    if who.reads is None:
        return partial(_copy_rows, *_rows(groups, is_sink, is_early, dtype))
    reads, earlier = take(who.reads[row], tokens), place.shape[0] - num_queries
    one_each = who.known is not None and who.known.groups_each == 1
    columns, kind = _columns(groups, is_sink, reads[earlier:], is_early[earlier:], one_each, dtype)
    return partial(_copy_columns, columns, kind, earlier)


def _rows(groups: Tensor, is_sink: Tensor, is_early: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What queries of each kind add to the score of each key, distance aside: 0 if the pair may attend.

    Returns:
        ``(kinds, S)``, and the kind of each token, ``(S,)``. Tokens with the same groups are of one kind.
    """
    ones = torch.ones_like(is_sink)
    kinds, kind = _unique_rows(torch.cat([groups, ones[:, None], is_early[:, None]], dim=1))
    return _zero_where(share_a_group(kinds, torch.cat([groups, is_sink[:, None], ones[:, None]], dim=1)), dtype), kind


def _columns(
    groups: Tensor, is_sink: Tensor, reads: Tensor, is_early: Tensor, one_each: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """What each query adds to the score of keys of each kind, distance aside.

    Returns:
        ``(Q, kinds)``, and the kind of each token, ``(S,)``: its group, if each has one; sinks are another kind.
    """
    num_groups = groups.shape[1]
    if one_each:
        kinds = torch.eye(num_groups + 1, dtype=torch.bool)
        kind = torch.where(is_sink, num_groups, groups.to(torch.uint8).argmax(dim=1))
    else:
        kinds, kind = _unique_rows(torch.cat([groups, is_sink[:, None]], dim=1))
    may_attend = share_a_group(torch.cat([reads, torch.ones_like(reads[:, :1])], dim=1), kinds)
    return _zero_where(may_attend | is_early[:, None], dtype), kind


def _zero_where(may_attend: Tensor, dtype: torch.dtype) -> Tensor:
    lowest = torch.tensor(torch.finfo(dtype).min, dtype=dtype)
    return torch.where(may_attend, torch.zeros((), dtype=dtype), lowest)


def _copy_rows(rows: Tensor, kind: Tensor, bias: Tensor, first: int) -> None:
    num_queries, num_keys = bias.shape
    torch.index_select(rows[:, :num_keys].contiguous(), 0, kind[first : first + num_queries], out=bias)


def _copy_columns(columns: Tensor, kind: Tensor, earlier: int, bias: Tensor, first: int) -> None:
    for start in range(0, bias.shape[0], ROWS):
        stop = min(start + ROWS, bias.shape[0])
        some, num_keys = columns[first - earlier + start : first - earlier + stop], first + stop
        bias[start:stop, :num_keys] = some.index_select(1, kind[:num_keys])
        bias[start:stop, num_keys:] = 0.0  # later keys: nobody sees them, but the kernel adds a number to them


def _unique_rows(columns: Tensor) -> tuple[Tensor, Tensor]:
    """The different rows of a bool matrix, and which of them each row is."""
    if columns.shape[1] > 62:
        return torch.unique(columns, dim=0, return_inverse=True)
    weights = 2 ** torch.arange(columns.shape[1])
    codes, kind = torch.unique((columns * weights).sum(dim=1), return_inverse=True)
    return (codes[:, None] & weights) > 0, kind


def _open_window(bias: Tensor, first: int, local_window: int) -> None:
    """Set the window of every query to 0, in place; row ``r`` of ``(Q, S)`` is token ``first + r``."""
    num_queries, num_keys = bias.shape
    short = max(0, min(num_queries, local_window - first))  # rows that reach back to the first key
    bias[:short, : first + short] = 0.0
    if short < num_queries:  # the band of the others as one strided view
        offset = short * num_keys + first + short - local_window
        bias.as_strided((num_queries - short, local_window + 1), (num_keys + 1, 1), offset).zero_()
