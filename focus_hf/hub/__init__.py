"""Adapters on the Hub: push, pull, search, look. Nothing here needs torch until a model is handed over."""

from .errors import HubError
from .pull import adapter_folder, load_adapted, pull
from .push import PushPlan, push_to_hub
from .search import Found, search

__all__ = ["Found", "HubError", "PushPlan", "adapter_folder", "load_adapted", "pull", "push_to_hub", "search"]
