"""Measure what an adapter keeps of the base model's quality, and what it saves."""

from .figures import quality_figure
from .perplexity import QualityRow, attended_share, perplexity, quality_table

__all__ = ["QualityRow", "attended_share", "perplexity", "quality_figure", "quality_table"]
