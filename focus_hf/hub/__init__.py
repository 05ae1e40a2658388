"""Share adapters: cards, push, pull. `focus_hf.hub.server` is a Hub for this machine."""

from .adapter_files import AdapterFileError, check_adapter, save_adapter
from .card import FocusModelCard
from .errors import HubError
from .pull import pull
from .push import push_to_hub
from .results import Results, load_results, save_results

__all__ = [
    "AdapterFileError",
    "FocusModelCard",
    "HubError",
    "Results",
    "check_adapter",
    "load_results",
    "pull",
    "push_to_hub",
    "save_adapter",
    "save_results",
]
