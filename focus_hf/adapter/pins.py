"""The base model that an adapter was trained on is pinned by its commit: say so when another one is in its place."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.utils import HFValidationError
from torch import nn

from ..commits import is_commit
from .config import FocusConfig


def warn_if_other_base(config: FocusConfig, model: nn.Module) -> None:
    """Warn when a base model from the Hub cannot be the commit that the adapter was trained on.

    A loaded model does not carry its commit, so this looks into the cache: if only another commit of the model is
    there, that is what was loaded. Models from folders or other caches are not judged.
    """
    name, pinned = getattr(model, "name_or_path", ""), config.revision
    if not name or os.path.isdir(name) or pinned is None or not is_commit(pinned):
        return
    try:
        current = try_to_load_from_cache(name, "config.json")
        wanted = try_to_load_from_cache(name, "config.json", revision=pinned)
    except HFValidationError:
        return
    if name == config.base_model_name_or_path and isinstance(current, str) and not isinstance(wanted, str):
        warnings.warn(
            f"This adapter was trained on {name} at commit {pinned[:12]}, but the copy here is at commit "
            f"{Path(current).parent.name[:12]}: its groups may not fit. Load the base model with revision={pinned!r}.",
            stacklevel=2,
        )
