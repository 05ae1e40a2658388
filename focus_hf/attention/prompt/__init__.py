"""Attention of many new tokens by groups of tokens, in standard calls: the paper's way."""

from .grouped import grouped_focus_attention
from .plan import make_plan

__all__ = ["grouped_focus_attention", "make_plan"]
