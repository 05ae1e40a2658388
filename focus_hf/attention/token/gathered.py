"""Few new tokens against a cache: the keys that each reads are gathered, and attended in one call.

The groups of keys become a mask, the mask an index, the keys and values at the index are gathered: what is read grows
with what is attended, besides a byte for each key and head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..definition import attended_pairs
from ..problem import Problem

#: More new tokens than this read so much together that gathering for each of them costs more than it saves.
MAX_QUERIES = 8


def gathered_focus_attention(problem: Problem) -> Tensor:
    """Hard Focus attention of few queries.

    Each query head of a key head gathers the same keys; a key head's queries gather each for themselves.

    Args:
        problem: what to compute, with plain scores; without sink logits.

    Returns:
        ``(B, H, Q, D_v)``; zeros for a query that sees nothing.
    """
    query, key, value = problem.query, problem.key, problem.value
    kv_heads = key.shape[1]
    pairs = attended_pairs(problem.who)
    if pairs.shape[1] < kv_heads:
        pairs = pairs.expand(-1, kv_heads, -1, -1)
    index, real = gather_index(pairs)  # (B, H_kv, Q, n)
    rows = index + torch.arange(index.shape[0] * kv_heads, device=index.device).view(-1, kv_heads, 1, 1) * key.shape[2]
    keys, values = (
        x.reshape(-1, x.shape[-1]).index_select(0, rows.flatten()).view(*index.shape, x.shape[-1])
        for x in (key, value)
    )
    queries = query.unflatten(1, (kv_heads, -1)).transpose(2, 3)  # (B, H_kv, Q, r, D)
    mask = None if real is None else real.unsqueeze(-2)
    if mask is not None and problem.who.first_position is None:
        mask = mask | ~mask.any(dim=-1, keepdim=True)  # a query that is padding
    output = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=problem.scores.scale)
    output = output.transpose(2, 3).flatten(1, 2)
    if problem.who.first_position is None:
        nothing = ~pairs.any(dim=-1, keepdim=True)
        output = output.masked_fill(nothing.repeat_interleave(query.shape[1] // kv_heads, dim=1), 0.0)
    return output


def gather_index(pairs: Tensor) -> tuple[Tensor, Tensor | None]:
    """Which keys each query attends to, one list each, as long as the longest.

    Args:
        pairs: bool ``(..., S)``.

    Returns:
        int64 ``(..., n)`` ascending, filled up with 0; and which entries are meant, bool, or ``None`` for all of them.
    """
    flat = pairs.reshape(-1, pairs.shape[-1])
    row, column = flat.nonzero(as_tuple=True)
    if flat.shape[0] == 1:
        return column.view(*pairs.shape[:-1], -1), None
    counts = flat.sum(dim=-1)
    starts = counts.cumsum(0) - counts
    longest = int(counts.max())
    place = torch.arange(row.shape[0], device=row.device) - starts[row]
    index = column.new_zeros(flat.shape[0], longest).index_put_((row, place), column)
    real = torch.arange(longest, device=row.device) < counts[:, None]
    return index.view(*pairs.shape[:-1], -1), real.view(*pairs.shape[:-1], -1)
