"""Attention of single new tokens of many sequences at once, over the keys that each of them attends to."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .masked import masked_attention
from .problem import Scores


def gather_index(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Where the keys stand that queries attend to, one row for each query.

    Args:
        pairs: bool ``(R, S)``.

    Returns:
        Ascending indices ``(R, A)`` into the ``S``, and bool ``(R, A)``: ``False`` where a row has fewer than the
        ``A`` of the longest one, and the index means nothing.
    """
    row, column = pairs.nonzero(as_tuple=True)
    counts = pairs.sum(dim=-1)
    starts = counts.cumsum(0) - counts
    index = column.new_zeros(pairs.shape[0], max(int(counts.max()), 1))
    index[row, torch.arange(row.shape[0], device=row.device) - starts[row]] = column
    return index, torch.arange(index.shape[1], device=row.device) < counts[:, None]


def gathered_attention(query: Tensor, key: Tensor, value: Tensor, real: Tensor, scores: Scores) -> Tensor:
    """Attention of one query per sequence over keys gathered for it.

    Args:
        query: ``(R, H, D)``.
        key: ``(R, H_kv, A, D)``.
        value: ``(R, H_kv, A, D_v)``.
        real: bool ``(R, A)``, which keys there are; a row without one gives zeros.
        scores: how they are made.

    Returns:
        ``(R, H, D_v)`` in the dtype of ``query``.
    """
    mask = real[:, None, None]
    if not scores.is_plain or scores.sink_logits is not None:
        return masked_attention(query[:, :, None], key, value, mask, scores)[:, :, 0].to(query.dtype)
    # Query heads of a key/value head take the place of queries: no key is repeated.
    folded = query.unflatten(1, (key.shape[1], -1))
    empty = ~real.any(dim=-1)[:, None, None, None]
    output = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask | empty, scale=scores.scale)
    return output.masked_fill(empty, 0.0).flatten(1, 2)
