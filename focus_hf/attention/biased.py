"""Hard Focus attention as dense attention under a bias: for short sequences and heavy groups, on CPU.

Where most pairs are attended there is little to skip, and one causal call of the flash kernel that adds a bias to
its scores costs hardly more than dense attention. A query's row of the bias depends on its groups alone, but for the
window: so there is one row for each combination of groups, and the rows of a block of queries are copies of these.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.profiler import record_function

from .kernels import cpu_flash
from .mask import PADDING, Pattern, share_a_group
from .merge import merge
from .plan import sequences
from .problem import Problem
from .rows import take
from .scratch import scratch

#: Numbers in one bias tensor, which as many queries share as fit, but not fewer than `MIN_QUERIES`.
BIAS_SIZE = 2**22

#: The kernel is fastest from 768 queries on.
MIN_QUERIES = 1024


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
        groups, place = take(who.memberships[row], tokens), take(who.positions[row], tokens)
        some = take(q[row], queries), take(k[row], tokens), take(v[row], tokens)
        into = output[row, queries]  # a view of the output, if its tokens are adjacent
        _sequence(*some, who.pattern, groups, place, scale, into)
        if not isinstance(queries, slice):
            output[row, queries] = into
    return output.transpose(1, 2)


def _sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    groups: Tensor,
    place: Tensor,
    scale: float,
    output: Tensor,
) -> None:
    """One document without padding: ``(Q, H, D)`` against ``(S, H_kv, D)``; ``place (S,)`` counts up by one."""
    num_queries, num_keys = query.shape[0], key.shape[0]
    earlier, block = num_keys - num_queries, max(MIN_QUERIES, BIAS_SIZE // num_keys)
    with record_function("focus: plan"):
        table, kind = _bias_table(pattern, groups, place, query.dtype)
        memory = scratch("bias", min(block, num_queries) * num_keys, like=table)
    for start in range(0, num_queries, block):
        stop = min(start + block, num_queries)
        first, new = earlier + start, slice(earlier + start, earlier + stop)
        with record_function("focus: plan"):
            bias = memory[: (stop - start) * new.stop].view(stop - start, new.stop)
            torch.index_select(table[:, : new.stop].contiguous(), 0, kind[new], out=bias)
            _open_window(bias, first, pattern.local_window)
        with record_function("focus: groups"):
            some = query[start:stop]
            part = cpu_flash(some, key[new], value[new], scale, causal=True, bias=bias[None, None, :, new])
            if first:
                before = cpu_flash(some, key[:first], value[:first], scale, bias=bias[None, None, :, :first])
                part = merge(*part, *before)
            output[start:stop] = part[0]


def _bias_table(pattern: Pattern, groups: Tensor, place: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What queries of each kind add to the score of each key, distance aside: 0 if the pair may attend.

    Returns:
        ``(kinds, S)``, and the kind of each token, ``(S,)``. Tokens with the same groups are of one kind.
    """
    ones = torch.ones_like(place, dtype=torch.bool)
    of_query = torch.cat([groups, ones[:, None], (place < pattern.dense_below)[:, None]], dim=1)
    of_key = torch.cat([groups, (place < pattern.sink_tokens)[:, None], ones[:, None]], dim=1)
    kinds, kind = _unique_rows(of_query)
    may_attend = share_a_group(kinds, of_key)
    lowest = torch.tensor(torch.finfo(dtype).min, dtype=dtype)
    return torch.where(may_attend, torch.zeros((), dtype=dtype), lowest), kind


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
