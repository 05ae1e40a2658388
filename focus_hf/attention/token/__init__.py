"""Attention of few new tokens against ordinary caches."""

from .gathered import gathered_focus_attention

__all__ = ["gathered_focus_attention"]
