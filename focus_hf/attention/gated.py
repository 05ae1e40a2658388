"""Soft Focus attention for training: gates on distant pairs instead of a hard mask."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from .mask import PADDING, Pattern
from .masked import masked_attention, repeat_heads


def gate_affinity(assignments: Tensor) -> Tensor:
    """How much two tokens share a group: ``min(1, g_i . g_j)``.

    For distributions the product is at most 1 already; the bound matters for memberships in several groups,
    where any shared group counts once.

    Args:
        assignments: ``(B, T, K)``.

    Returns:
        ``(B, T, T)``, in [0, 1].
    """
    product = torch.matmul(assignments, assignments.transpose(-1, -2))
    # Not clamp(): rounding can lift a pair of one group just above 1, and clamp() would then stop its gradient.
    return product - (product - 1.0).clamp(min=0.0).detach()


def gated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    positions: Tensor,
    assignments: Tensor,
    scale: float,
    *,
    gate: str,
    strength: float,
    extra_mask: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Causal attention in which distant pairs are gated by their affinity; differentiable in ``assignments``.

    Local pairs (``i - j <= w``) and pairs with a sink are untouched. The gates:

    * ``"additive"``: the score of a distant pair gets ``-strength * (1 - affinity)``: 0 within a group, falling
      to ``-strength`` across groups. With a growing strength this becomes the hard mask.
    * ``"multiplicative"`` (paper, eq. 2): the score is multiplied by ``sigmoid(strength * affinity)``. It never
      removes a pair, so hard inference computes another function than this.

    Memory is quadratic in ``T``.

    Args:
        query: ``(B, H, T, D)``.
        key: ``(B, H_kv, T, D)``.
        value: ``(B, H_kv, T, D_v)``.
        pattern: window and sinks.
        positions: ``(B, T)`` integers, ``PADDING`` for padding.
        assignments: ``(B, T, K)`` float, soft or straight-through.
        scale: factor on ``q . k``.
        gate: a name in `GATES`.
        strength: ``lambda``, non-negative.
        extra_mask: bool ``(B, 1 or H, T, T)``, see `masked_focus_attention`.
        softcap, sink_logits, dropout: see `masked_attention`.

    Returns:
        ``(B, H, T, D_v)``.
    """
    i, j = positions[:, :, None], positions[:, None, :]
    allowed = ((j <= i) & (j != PADDING) & (i != PADDING))[:, None]
    if extra_mask is not None:
        allowed = allowed & extra_mask
    distant = (i - j > pattern.local_window) & (j >= pattern.sink_tokens)
    return GATES[gate](
        query,
        key,
        value,
        allowed,
        distant[:, None],
        gate_affinity(assignments)[:, None],
        scale=scale,
        strength=strength,
        softcap=softcap,
        sink_logits=sink_logits,
        dropout=dropout,
    )


def _additive(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor,
    distant: Tensor,
    affinity: Tensor,
    *,
    scale: float,
    strength: float,
    softcap: float | None,
    sink_logits: Tensor | None,
    dropout: float,
) -> Tensor:
    bias = torch.where(distant, strength * (affinity - 1.0), affinity.new_zeros(()))
    if softcap is not None or sink_logits is not None:
        return masked_attention(
            query,
            key,
            value,
            allowed,
            scale,
            bias=bias,
            softcap=softcap,
            sink_logits=sink_logits,
            dropout=dropout,
        )
    # Padding rows see everything (a row of -inf would poison the gradient); their output is not used.
    visible = allowed | ~allowed.any(dim=-1, keepdim=True)
    bias = bias.masked_fill(~visible, float("-inf")).to(query.dtype)
    num_heads = query.shape[1]
    return F.scaled_dot_product_attention(
        query,
        repeat_heads(key, num_heads),
        repeat_heads(value, num_heads),
        attn_mask=bias,
        dropout_p=dropout,
        scale=scale,
    )


def _multiplicative(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor,
    distant: Tensor,
    affinity: Tensor,
    *,
    scale: float,
    strength: float,
    softcap: float | None,
    sink_logits: Tensor | None,
    dropout: float,
) -> Tensor:
    factor = torch.where(distant, torch.sigmoid(strength * affinity), affinity.new_ones(()))
    return masked_attention(
        query,
        key,
        value,
        allowed,
        scale,
        gate=factor,
        softcap=softcap,
        sink_logits=sink_logits,
        dropout=dropout,
    )


#: The gates by name, as `FocusConfig.gate` gives them.
GATES: dict[str, Callable[..., Tensor]] = {"additive": _additive, "multiplicative": _multiplicative}
