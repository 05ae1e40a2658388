"""Sharing adapters: their files, their cards, the Hub. Nothing here needs torch but `focus_hf.hub.save`."""

from .adapter_files import AdapterConfig, AdapterFileError, check_adapter, read_config
from .card import FocusModelCard
from .errors import HubError
from .group_report import GroupReport
from .pull import adapter_folder, check_writable, pull
from .push import PushPlan, push_to_hub
from .results import Evaluation, Results, load_results, save_results
from .search import Found, search

__all__ = [
    "AdapterConfig",
    "AdapterFileError",
    "Evaluation",
    "FocusModelCard",
    "Found",
    "GroupReport",
    "HubError",
    "PushPlan",
    "Results",
    "adapter_folder",
    "check_adapter",
    "check_writable",
    "load_results",
    "pull",
    "push_to_hub",
    "read_config",
    "save_results",
    "search",
]
