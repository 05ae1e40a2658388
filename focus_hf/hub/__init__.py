"""Share adapters: cards, push, pull. `focus_hf.hub.server` is a Hub for this machine."""

from .adapter_files import AdapterFileError, check_adapter, save_adapter
from .card import FocusModelCard
from .errors import HubError
from .pull import adapter_folder, check_writable, pull
from .push import push_to_hub
from .results import Evaluation, Results, load_results, save_results

__all__ = [
    "AdapterFileError",
    "Evaluation",
    "FocusModelCard",
    "HubError",
    "Results",
    "adapter_folder",
    "check_adapter",
    "check_writable",
    "load_results",
    "pull",
    "push_to_hub",
    "save_adapter",
    "save_results",
]
