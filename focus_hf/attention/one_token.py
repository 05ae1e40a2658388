"""Attention of one new token for each sequence against keys in plain storage."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.nn import functional as F


class OneToken(Protocol):
    """The groups of a call with one new token for each sequence, in whatever way they are known."""

    @property
    def length(self) -> int:
        """Tokens in all, ``S``, the new one included."""

    @property
    def num_groups(self) -> int:
        """``K``."""

    def added_to_scores(self) -> Tensor:
        """0 for tokens that the new one attends to, ``-inf`` for all others: float32 ``(B, H_kv or 1, S)``."""


def attend_one_token(query: Tensor, key: Tensor, value: Tensor, token: OneToken, scale: float) -> Tensor:
    """Hard Focus attention of one new token for each sequence, with plain scores and nothing hidden.

    The query heads of a key/value head become its queries, so that keys are read once and not repeated.

    Args:
        query: ``(B, H, 1, D)``.
        key: ``(B, H_kv, S, D)``.
        value: ``(B, H_kv, S, D_v)``.
        token: its groups and theirs.
        scale: factor on ``q . k``.

    Returns:
        ``(B, H, 1, D_v)``.
    """
    added = token.added_to_scores().unsqueeze(2).to(query.dtype)
    batch, heads, _, width = query.shape
    folded = query.reshape(batch, key.shape[1], -1, width)
    output = F.scaled_dot_product_attention(folded, key, value, attn_mask=added, scale=scale)
    return output.view(batch, heads, 1, -1)
