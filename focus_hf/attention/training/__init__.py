"""Attention while centroids of a shared routing train: soft gates, and gradients of hard memberships."""

from .gated import GATES, HARD_GATE, gated_attention
from .hard_gate import credit_memberships

__all__ = ["GATES", "HARD_GATE", "credit_memberships", "gated_attention"]
