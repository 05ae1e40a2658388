"""Two adapters of one base model beside each other; Focus beside LoRA, trained on the same windows."""

from .adapters import Compared, adapters_table, compare_adapters
from .lora import ComparisonRow, compare_with_lora, comparison_table

__all__ = [
    "Compared",
    "ComparisonRow",
    "adapters_table",
    "compare_adapters",
    "compare_with_lora",
    "comparison_table",
]
