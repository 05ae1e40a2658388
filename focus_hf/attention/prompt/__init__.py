"""Attention of many new tokens: by groups of tokens in standard calls (the paper's), or by what blocks read."""

from .blocks import blocked_focus_attention
from .grouped import grouped_focus_attention
from .plan import make_plan

__all__ = ["blocked_focus_attention", "grouped_focus_attention", "make_plan"]
