"""Two adapters of one base model beside each other, by what was measured."""

from .adapters import Compared, adapters_table, compare_adapters

__all__ = [
    "Compared",
    "adapters_table",
    "compare_adapters",
]
