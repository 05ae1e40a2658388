"""Focus beside LoRA, trained on the same windows with as many parameters."""

from .lora import ComparisonRow, compare_with_lora, comparison_table

__all__ = ["ComparisonRow", "compare_with_lora", "comparison_table"]
