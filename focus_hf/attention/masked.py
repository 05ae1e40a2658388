"""Attention under a boolean mask: plain, slow, and right for every option. The reference of all fast paths."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .definition import attended_pairs, one_head
from .problem import Problem, Scores

#: Queries handled together when no gradient is needed; bounds the mask at ``B * H_kv * QUERY_CHUNK * S`` bytes.
QUERY_CHUNK = 512


def repeat_heads(states: Tensor, num_heads: int) -> Tensor:
    """Give every query head its own copy of its key/value head: ``(B, H_kv, S, D)`` to ``(B, H, S, D)``.

    One head stays one, which broadcasts.
    """
    if states.shape[1] in (1, num_heads):
        return states
    return states.repeat_interleave(num_heads // states.shape[1], dim=1)


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scores: Scores, *, gate: Tensor | None = None
) -> Tensor:
    """Softmax attention over the pairs that ``mask`` allows, spelled out.

    Args:
        query, key, value: see `Problem`.
        mask: bool ``(B or 1, 1 or H_kv or H, Q, S)``; a row without any allowed pair gives zeros.
        scores: how they are made.
        gate: multiplied onto the scores, broadcastable to ``(B, H, Q, S)``.

    Returns:
        ``(B, H, Q, D_v)`` in the dtype of ``value``.
    """
    num_heads = query.shape[1]
    key, value, mask = (repeat_heads(x, num_heads) for x in (key, value, mask))
    logits = torch.matmul(query, key.transpose(-1, -2)) * scores.scale
    if logits.dtype != torch.float64:
        logits = logits.float()
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    if scores.bias is not None:
        logits = logits + scores.bias
    if gate is not None:
        logits = logits * gate
    logits = logits.masked_fill(~mask, float("-inf"))
    if scores.sink_logits is not None:
        column = scores.sink_logits.to(logits.dtype).view(1, -1, 1, 1).expand(logits.shape[0], -1, logits.shape[2], 1)
        logits = torch.cat([logits, column], dim=-1)
    # A row of -inf only (padding) would be NaN; its output is zero.
    logits = logits.masked_fill((logits == float("-inf")).all(dim=-1, keepdim=True), 0.0)
    weights = torch.softmax(logits, dim=-1)[..., : key.shape[2]].masked_fill(~mask, 0.0)
    return torch.matmul(F.dropout(weights, scores.dropout).to(value.dtype), value)


def masked_focus_attention(problem: Problem) -> Tensor:
    """Focus attention by building the mask, a block of queries at a time. Exact for every option.

    Returns:
        ``(B, H, Q, D_v)``.
    """
    query, num_queries, who = problem.query, problem.num_queries, problem.who
    chunk = num_queries if torch.is_grad_enabled() and query.requires_grad else QUERY_CHUNK
    each_sees_itself = who.first_position is not None and who.extra_mask is None
    parts = []
    for start in range(0, num_queries, chunk):
        rows = slice(start, min(start + chunk, num_queries))
        seen = slice(problem.num_keys - num_queries + rows.stop)  # what comes later, nobody attends to
        mask, some = one_head(attended_pairs(who, rows, seen)), problem.scores.part(rows, seen)
        key, value = problem.key[:, :, seen], problem.value[:, :, seen]
        own = query[:, :, rows]
        parts.append(attend_under_mask(own, key, value, mask, some, none_empty=each_sees_itself))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def attend_under_mask(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scores: Scores, *, none_empty: bool = False
) -> Tensor:
    """`masked_attention`, by PyTorch's own where that can compute the scores.

    Arguments as there, and:
        none_empty: every row of the mask is known to allow a pair.
    """
    if scores.softcap is not None or scores.sink_logits is not None or scores.bias is not None:
        return masked_attention(query, key, value, mask, scores)
    num_heads, kv_heads = query.shape[1], key.shape[1]
    if query.shape[2] == 1 and mask.shape[1] in (1, kv_heads) and num_heads > kv_heads:
        # One token: the query heads of a key head become its queries, so that keys are not copied.
        folded = query.unflatten(1, (kv_heads, -1)).squeeze(3)
        return attend_under_mask(folded, key, value, mask, scores, none_empty=none_empty).flatten(1, 2)[:, :, None]
    key, value, mask = (repeat_heads(x, num_heads) for x in (key, value, mask))
    key, value = (x.expand(-1, num_heads, -1, -1) for x in (key, value))
    empty = None if none_empty else ~mask.any(dim=-1, keepdim=True)  # would be NaN, or not, by backend
    allowed = mask if empty is None else mask | empty
    drop, scale = scores.dropout, scores.scale
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed, dropout_p=drop, scale=scale)
    return output if empty is None else output.masked_fill(empty, 0.0)
