"""Find the attention modules of a model, so that a new architecture works on the day it appears."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from torch import nn


def calls_attention_interface(module: nn.Module) -> bool:
    """Whether the module computes attention through transformers' `AttentionInterface`.

    Looks at the names that the code of its class's ``forward`` uses: there is no common base class.
    """
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def is_causal_self_attention(module: nn.Module) -> bool:
    """Whether Focus can route this module: attention of a decoder over its own tokens."""
    return (
        calls_attention_interface(module)
        and bool(getattr(module, "is_causal", False))
        and not getattr(module, "is_cross_attention", False)
        and getattr(module, "layer_idx", None) is not None
        and getattr(module, "config", None) is not None
    )


def is_local_by_design(module: nn.Module) -> bool:
    """Whether the architecture limits this layer to nearby tokens (sliding window, chunks)."""
    config, layer_idx = module.config, module.layer_idx
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return layer_types[layer_idx] != "full_attention"
    window = getattr(module, "sliding_window", None)
    if not hasattr(module, "sliding_window"):
        window = getattr(config, "sliding_window", None)
    if window is None:
        return False
    # A window as long as the longest context limits nothing (Phi-3-mini-128k).
    return window < (getattr(config, "max_position_embeddings", None) or window + 1)


def find_attention(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules of ``model`` that call the attention interface, with their names."""
    for name, module in model.named_modules():
        if calls_attention_interface(module):
            yield name, module
