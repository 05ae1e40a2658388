"""Hard Focus attention as dense attention under a bias: for short sequences and heavy groups, on CPU.

Where most pairs are attended there is little to skip, and one causal call of the flash kernel that adds a bias to
its scores costs hardly more than dense attention. A query's row of the bias depends on its groups alone, but for the
window: so there is one row for each combination of groups, and the rows of a block of queries are copies of these.
Where queries read other groups than they belong to there are about as many combinations as queries; then there is one
column for each group of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from .kernels import cpu_flash
from .mask import WhoAttends, share_a_group
from .merge import merge
from .plan import sequences
from .problem import Problem
from .rows import take
from .scratch import scratch
from .steps import step

#: Numbers in one bias tensor, which as many queries share as fit, but not fewer than `MIN_QUERIES`.
BIAS_SIZE = 2**22

#: The kernel is fastest from 768 queries on.
MIN_QUERIES = 1024

#: So many sets of groups, in any order, have rows made for all of them: finding those that occur takes longer.
MAX_SETS = 64

#: Rows of a bias that are made together from its columns.
ROWS = 256


def biased_focus_attention(problem: Problem) -> Tensor:
    """Hard Focus attention under a bias. Inference on CPU, without sink logits.

    Returns:
        As `grouped_focus_attention`.
    """
    batch, _, num_queries, _ = problem.query.shape
    output = None
    for row, queries, part in _parts(problem):
        if batch == 1 and part.shape[0] == num_queries:
            return part[None].transpose(1, 2)  # all there is, as it is
        if output is None:
            output = _output_of(problem)
        output[row, queries] = part
    return (_output_of(problem) if output is None else output).transpose(1, 2)


def _output_of(problem: Problem) -> Tensor:
    """``(B, Q, H, D_v)``; zero where padding may be."""
    batch, num_heads, num_queries, _ = problem.query.shape
    shape = batch, num_queries, num_heads, problem.value.shape[-1]
    return problem.query.new_empty(shape) if problem.who.is_plain else problem.query.new_zeros(shape)


#: Writes what groups add to the scores of adjacent queries, ``(Q, S)``, given the first one's place among the ``S``.
Fill = Callable[[Tensor, int], None]


def _parts(problem: Problem) -> Iterator[tuple[int, Tensor | slice, Tensor]]:
    """The output in parts: row, queries, ``(Q, H, D_v)``."""
    who, num_queries = problem.who, problem.query.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (problem.query, problem.key, problem.value))
    for row, tokens, queries in sequences(who, num_queries):
        some = take(q[row], queries), take(k[row], tokens), take(v[row], tokens)
        with step("plan"):
            fill = _how_to_fill(who, row, tokens, some[0].shape[0], problem.query.dtype)
        start = 0
        for part in _sequence(*some, fill, who.pattern.local_window, problem.scores.scale):
            stop = start + part.shape[0]
            yield row, slice(start, stop) if isinstance(queries, slice) else queries[start:stop], part
            start = stop


def _sequence(
    query: Tensor, key: Tensor, value: Tensor, fill: Fill, local_window: int, scale: float
) -> Iterator[Tensor]:
    """One document without padding: ``(Q, H, D)`` against ``(S, H_kv, D)``, the last of which are the queries'.

    Yields:
        The output of some queries after the other.
    """
    num_queries, num_keys = query.shape[0], key.shape[0]
    earlier, block = num_keys - num_queries, max(MIN_QUERIES, BIAS_SIZE // num_keys)
    memory = scratch("bias", min(block, num_queries) * num_keys, like=query)
    for start in range(0, num_queries, block):
        stop = min(start + block, num_queries)
        first, new = earlier + start, slice(earlier + start, earlier + stop)
        with step("plan"):
            bias = memory[: (stop - start) * new.stop].view(stop - start, new.stop)
            fill(bias, first)
            _open_window(bias, first, local_window)
        with step("groups"):
            some = query[start:stop]
            part = cpu_flash(some, key[new], value[new], scale, causal=True, bias=bias[None, None, :, new])
            if first:
                before = cpu_flash(some, key[:first], value[:first], scale, bias=bias[None, None, :, :first])
                part = merge(*part, *before)
        yield part[0]


def _how_to_fill(who: WhoAttends, row: int, tokens: Tensor | slice, num_queries: int, dtype: torch.dtype) -> Fill:
    """Of a document, the last ``num_queries`` of whose tokens are the queries; their places count up by one."""
    pattern, place = who.pattern, take(who.positions[row], tokens)
    groups = take(who.memberships[row], tokens)
    is_sink, is_early = place < pattern.sink_tokens, place < pattern.dense_below
    each = None if who.known is None else who.known.groups_each
    if who.reads is None:
        if each and groups.shape[1] ** each <= MAX_SETS and not pattern.dense_below:
            return partial(_copy_rows, *_rows_of_sets(groups, is_sink, each, dtype))
        return partial(_copy_rows, *_rows(groups, is_sink, is_early, dtype))
    reads, earlier = take(who.reads[row], tokens), place.shape[0] - num_queries
    columns, kind = _columns(groups, is_sink, reads[earlier:], is_early[earlier:], each == 1, dtype)
    return partial(_copy_columns, columns, kind, earlier)


def _rows(groups: Tensor, is_sink: Tensor, is_early: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What queries of each kind add to the score of each key, distance aside: 0 if the pair may attend.

    Returns:
        ``(kinds, S)``, and the kind of each token, ``(S,)``. Tokens with the same groups are of one kind.
    """
    ones = torch.ones_like(is_sink)
    kinds, kind = _unique_rows(torch.cat([groups, ones[:, None], is_early[:, None]], dim=1))
    return _zero_where(share_a_group(kinds, torch.cat([groups, is_sink[:, None], ones[:, None]], dim=1)), dtype), kind


def _rows_of_sets(groups: Tensor, is_sink: Tensor, each: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`_rows` where every token is in so many groups: of all sets of groups, whether or not a token has them."""
    of_group = _zero_where(groups.t() | is_sink, dtype)
    numbers = groups.to(torch.uint8).topk(each, dim=1).indices
    rows, kind = of_group, numbers[:, 0]
    for place in range(1, each):
        rows = torch.maximum(rows[:, None], of_group).flatten(0, 1)
        kind = kind * groups.shape[1] + numbers[:, place]
    return rows, kind


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
