"""Attention under a boolean mask: plain, slow, and right for every option. The reference of all fast paths."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .mask import Pattern, attended_pairs

#: Queries handled together when no gradient is needed; bounds the mask at ``B * QUERY_CHUNK * S`` bytes.
QUERY_CHUNK = 1024


def repeat_heads(states: Tensor, num_heads: int) -> Tensor:
    """Give every query head its own copy of its key/value head: ``(B, H_kv, S, D)`` to ``(B, H, S, D)``."""
    return states if states.shape[1] == num_heads else states.repeat_interleave(num_heads // states.shape[1], dim=1)


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    *,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention over the pairs that ``mask`` allows, spelled out.

    Args:
        query: ``(B, H, Q, D)``.
        key: ``(B, H_kv, S, D)`` with ``H`` a multiple of ``H_kv``.
        value: ``(B, H_kv, S, D_v)``.
        mask: bool, broadcastable to ``(B, H, Q, S)``; a row without any allowed pair gives zeros.
        scale: factor on ``q . k``.
        softcap: ``c`` of ``c * tanh(score / c)`` (Gemma-2), or ``None``.
        sink_logits: ``(H,)``, a learned logit per head that takes part in the softmax and contributes no value
            (gpt-oss), or ``None``.
        bias: added to the scores, broadcastable to ``(B, H, Q, S)``.
        gate: multiplied onto the scores, likewise.
        dropout: probability of dropping an attention weight.

    Returns:
        ``(B, H, Q, D_v)`` in the dtype of ``value``.
    """
    num_heads = query.shape[1]
    key, value = repeat_heads(key, num_heads), repeat_heads(value, num_heads)
    scores = torch.matmul(query, key.transpose(-1, -2)) * scale
    if scores.dtype != torch.float64:
        scores = scores.float()
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if gate is not None:
        scores = scores * gate
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~mask, float("-inf"))
    if sink_logits is not None:
        column = sink_logits.to(scores.dtype).view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        scores = torch.cat([scores, column], dim=-1)
    # A row of -inf only (padding) would be NaN; its output is zero.
    scores = scores.masked_fill((scores == float("-inf")).all(dim=-1, keepdim=True), 0.0)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]].masked_fill(~mask, 0.0)
    return torch.matmul(F.dropout(weights, dropout).to(value.dtype), value)


def masked_focus_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    positions: Tensor,
    memberships: Tensor,
    scale: float,
    *,
    documents: Tensor | None = None,
    extra_mask: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Focus attention by building the mask, a block of queries at a time. Exact for every option.

    The queries are the last ``Q`` of the ``S`` tokens, so a chunk of new tokens against a longer cache is the
    same call.

    Args:
        query: ``(B, H, Q, D)``.
        key: ``(B, H_kv, S, D)``.
        value: ``(B, H_kv, S, D_v)``.
        pattern: window and sinks.
        positions: ``(B, S)`` integers, ``PADDING`` for padding.
        memberships: ``(B, S, K)`` bool.
        scale: factor on ``q . k``.
        documents: ``(B, S)`` integers, which of several documents packed into a row; ``None`` for one each.
        extra_mask: bool ``(B, 1 or H, Q, S)``, pairs that the model itself allows, for anything beyond
            causality, padding and documents (a sliding window).
        softcap, sink_logits, dropout: see `masked_attention`.

    Returns:
        ``(B, H, Q, D_v)``.
    """
    num_queries, first = query.shape[2], key.shape[2] - query.shape[2]
    chunk = num_queries if torch.is_grad_enabled() and query.requires_grad else QUERY_CHUNK
    plain = softcap is None and sink_logits is None
    parts = []
    for start in range(0, num_queries, chunk):
        stop = min(start + chunk, num_queries)
        rows = slice(first + start, first + stop)
        mask = attended_pairs(
            pattern,
            positions[:, rows],
            positions,
            memberships[:, rows],
            memberships,
            None if documents is None else documents[:, rows],
            documents,
        )[:, None]
        if extra_mask is not None:
            mask = mask & extra_mask[:, :, start:stop]
        block = query[:, :, start:stop]
        if plain:
            parts.append(_sdpa(block, key, value, mask, scale, dropout))
        else:
            parts.append(
                masked_attention(
                    block, key, value, mask, scale, softcap=softcap, sink_logits=sink_logits, dropout=dropout
                )
            )
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, dropout: float) -> Tensor:
    """PyTorch's own masked attention; rows without an allowed pair give zeros on every backend."""
    num_heads = query.shape[1]
    key, value = repeat_heads(key, num_heads), repeat_heads(value, num_heads)
    empty = ~mask.any(dim=-1, keepdim=True)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask | empty, dropout_p=dropout, scale=scale)
    return output.masked_fill(empty, 0.0)
