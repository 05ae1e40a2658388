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
    documents: Tensor | None = None,
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
        documents, extra_mask: see `masked_focus_attention`.
        softcap, sink_logits, dropout: see `masked_attention`.

    Returns:
        ``(B, H, T, D_v)``.
    """
    i, j = positions[:, :, None], positions[:, None, :]
    allowed = ((j <= i) & (j != PADDING) & (i != PADDING))[:, None]
    if documents is not None:
        allowed = allowed & (documents[:, :, None] == documents[:, None, :])[:, None]
    if extra_mask is not None:
        allowed = allowed & extra_mask
    distant = (i - j > pattern.local_window) & (j >= pattern.sink_tokens)
    factor, bias = GATES[gate](gate_affinity(assignments), distant, strength)
    if factor is None and bias is not None and softcap is None and sink_logits is None:
        return _biased_attention(query, key, value, allowed, bias[:, None], scale, dropout)
    return masked_attention(
        query,
        key,
        value,
        allowed,
        scale,
        gate=None if factor is None else factor[:, None],
        bias=None if bias is None else bias[:, None],
        softcap=softcap,
        sink_logits=sink_logits,
        dropout=dropout,
    )


def _additive(affinity: Tensor, distant: Tensor, strength: float) -> tuple[Tensor | None, Tensor | None]:
    return None, torch.where(distant, strength * (affinity - 1.0), affinity.new_zeros(()))


def _multiplicative(affinity: Tensor, distant: Tensor, strength: float) -> tuple[Tensor | None, Tensor | None]:
    return torch.where(distant, torch.sigmoid(strength * affinity), affinity.new_ones(())), None


#: The gates by name, as `FocusConfig.gate` gives them. From affinity and distant pairs ``(B, T, T)`` and the strength,
#: each makes what is multiplied onto the scores and what is added to them.
GATES: dict[str, Callable[[Tensor, Tensor, float], tuple[Tensor | None, Tensor | None]]] = {
    "additive": _additive,
    "multiplicative": _multiplicative,
}


def _biased_attention(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, bias: Tensor, scale: float, dropout: float
) -> Tensor:
    """The common case through PyTorch's own attention, which is faster than spelling it out."""
    # Padding rows see everything (a row of -inf would poison the gradient); their output is not used.
    visible = allowed | ~allowed.any(dim=-1, keepdim=True)
    num_heads = query.shape[1]
    return F.scaled_dot_product_attention(
        query,
        repeat_heads(key, num_heads),
        repeat_heads(value, num_heads),
        attn_mask=bias.masked_fill(~visible, float("-inf")).to(query.dtype),
        dropout_p=dropout,
        scale=scale,
    )
