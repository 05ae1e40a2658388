"""Attention of many new tokens: by groups of tokens in standard calls (the paper's), or by what blocks read."""

from .blocks import blocked_focus_attention
from .grouped import attend_parts, grouped_focus_attention
from .plan import make_plan

__all__ = ["attend_parts", "blocked_focus_attention", "grouped_focus_attention", "make_plan"]
