"""Prompts on a CPU: a block of queries attends to the keys that any of them reads, and to no others.

Consecutive queries of a key head read much the same, so their keys are gathered once for all of them, and what is not
each one's own is hidden by a bias.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..definition import attended_pairs
from ..kernels import cpu_flash
from ..problem import Problem

#: Rows of a block: its queries, once for each query head of a key head.
ROWS = 96

#: Queries whose mask is made together; bounds memory at ``H_kv * MASKED * S`` bytes.
MASKED = 512


def blocked_focus_attention(problem: Problem) -> Tensor:
    """Hard Focus attention on CPU, for any groups and reads.

    Args:
        problem: what to compute, with plain scores, without sink logits, and ``D_v <= D``.

    Returns:
        ``(B, H, Q, D_v)``; zeros for padding. It has no gradient.
    """
    query, value = problem.query, problem.value
    output = query.new_zeros(*query.shape[:3], value.shape[-1])
    for row in range(query.shape[0]):
        _sequence(output[row], problem.sequence(row))
    return output


def _sequence(output: Tensor, problem: Problem) -> None:
    """``output (H, Q, D_v)`` of a batch of one."""
    query, key, value = (x[0] for x in (problem.query, problem.key, problem.value))
    num_heads, num_queries, _ = query.shape
    kv_heads, num_keys, _ = key.shape
    repeat = num_heads // kv_heads
    size = max(8, ROWS // repeat)
    first = num_keys - num_queries
    for start in range(0, num_queries, MASKED):
        stop = min(start + MASKED, num_queries)
        seen = first + stop
        pairs = attended_pairs(problem.who, slice(start, stop), slice(0, seen))[0]
        for head in range(kv_heads):
            own = slice(head * repeat, (head + 1) * repeat)
            mine = pairs[head if pairs.shape[0] > 1 else 0]
            for block in range(start, stop, size):
                rows = slice(block, min(block + size, stop))
                mask = mine[block - start : rows.stop - start, : first + rows.stop]
                output[own, rows] = _block(query[own, rows], key[head], value[head], mask, problem.scores.scale)


def _block(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Queries ``(r, n, D)`` of one key head under their mask ``(n, S)``: ``(r, n, D_v)``."""
    columns = mask.any(dim=0).nonzero().squeeze(-1)
    if columns.shape[0] == 0:
        return query.new_zeros(*query.shape[:2], value.shape[-1])
    hidden = ~mask.index_select(1, columns)
    lowest = torch.finfo(query.dtype).min
    bias = query.new_zeros(hidden.shape).masked_fill_(hidden, lowest)
    keys, values = key.index_select(0, columns), value.index_select(0, columns)
    output, _ = cpu_flash(query.transpose(0, 1), keys[:, None], values[:, None], scale, bias=bias[None, None])
    output = output.transpose(0, 1)
    nothing = hidden.all(dim=-1)
    return output.masked_fill(nothing[:, None], 0.0) if bool(nothing.any()) else output
