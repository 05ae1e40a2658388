"""Focus adapters for Hugging Face models: sparse long-range attention from a few trained centroids.

Importing this package registers the adapter type ``FOCUS`` with PEFT and attention ``"focus"`` with transformers, so
that ``model.load_adapter("org/name")`` works.
"""

from .adapter import FocusConfig, FocusLayer, FocusModel, set_routing
from .card import FocusModelCard
from .hub import pull, push_to_hub
from .interpret import GroupReport, group_report

__version__ = "0.1.0"

__all__ = [
    "FocusConfig",
    "FocusLayer",
    "FocusModel",
    "FocusModelCard",
    "GroupReport",
    "__version__",
    "group_report",
    "pull",
    "push_to_hub",
    "set_routing",
]
