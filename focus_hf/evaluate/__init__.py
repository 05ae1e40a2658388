"""Measure what an adapter keeps of the base model's quality, and what it saves."""

from .perplexity import QualityRow, attended_share, perplexity, quality_table

__all__ = ["QualityRow", "attended_share", "perplexity", "quality_table"]
