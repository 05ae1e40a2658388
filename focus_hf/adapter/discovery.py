"""Find the attention modules of a model, so that a new architecture works on the day it appears."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn


def calls_attention_interface(module: nn.Module) -> bool:
    """Whether the module computes attention through transformers' `AttentionInterface`.

    Looks at the names that the code of its class's ``forward`` uses: there is no common base class.
    """
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def why_not(module: Any, include_sliding: bool) -> str | None:
    """Why Focus cannot route an attention module, as the end of a sentence about it; ``None`` if it can.

    What is not known to give right results is refused: of layers whose pairs the architecture chooses by itself, only
    sliding windows can be routed, and only where that was asked for.
    """
    if not hasattr(module, "is_causal"):
        return "do not say whether they are causal"
    if not module.is_causal:
        return NOT_CAUSAL
    if getattr(module, "is_cross_attention", False):
        return "attend to another sequence"
    if getattr(module, "layer_idx", None) is None or getattr(module, "config", None) is None:
        return "have no number or no configuration"
    if getattr(module, "is_kv_shared_layer", False):
        return "use the keys of another layer"
    code = _attention_call(module.__class__)
    if code.cache_slot not in (None, "self.layer_idx"):
        return f"keep their keys in a slot of the cache of their own choosing ({code.cache_slot})"
    if code.foreign:
        return f"hand {', '.join(code.foreign)} to the attention function, which Focus does not know"
    if getattr(module, "attn_logit_softcapping", None) and module.config._attn_implementation == "sdpa":
        return LOSES_CAP
    kind = _layer_type(module)
    if kind not in (None, *EVERYTHING, *SLIDING):
        return f"choose the tokens that they attend to by themselves (layer type {kind!r})"
    return IS_SLIDING if not include_sliding and slides(module) else None


def slides(module: Any) -> bool:
    """Whether the architecture gives this attention module a sliding window."""
    kind = _layer_type(module)
    return kind in SLIDING if kind is not None else _has_short_window(module)


#: Types of layers, in a configuration's ``layer_types``, that attend to everything, and to a sliding window.
EVERYTHING, SLIDING = ("full_attention", "attention", "hybrid"), ("sliding_attention",)

#: Reasons that `targets` has advice for.
NOT_CAUSAL, IS_SLIDING = "are not causal", "use a sliding window by design"

#: transformers before 5.21 gives Gemma-2 SDPA by default, which leaves out what the model was trained with.
LOSES_CAP = 'lose the soft-capping of their scores with SDPA: load the base model with attn_implementation="eager"'

#: What attention functions are told by name, and Focus honours or need not.
_KNOWN = {"attention_mask", "dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal", "deterministic"}
_KNOWN |= {"output_attentions", "position_ids", "layer_idx", "cache_position", "query", "key", "value"}
_KNOWN |= {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "head_mask", "use_cache"}


@dataclass(frozen=True)
class _AttentionCall:
    """What the source of an attention module says.

    Args:
        cache_slot: the expression for the layer of the cache in which it keeps its keys; ``None`` if it has none.
        foreign: names of arguments to the attention function that Focus does not know.
    """

    cache_slot: str | None
    foreign: tuple[str, ...]


@functools.cache
def _attention_call(module_class: Any) -> _AttentionCall:
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(module_class.forward)))
    except (OSError, TypeError):  # no source to read
        return _AttentionCall(None, ())
    slot, foreign = None, set()
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        function = ast.unparse(call.func)
        if function == "attention_interface":
            foreign |= {keyword.arg for keyword in call.keywords if keyword.arg is not None} - _KNOWN
        elif function.endswith(".update") and "past" in function and len(call.args) >= 3:
            slot = ast.unparse(call.args[2])
    return _AttentionCall(slot, tuple(sorted(foreign)))


def _layer_type(module: Any) -> str | None:
    """What the configuration calls this layer, if it says."""
    types = getattr(module.config, "layer_types", None)
    return types[module.layer_idx] if types and module.layer_idx < len(types) else None


def _has_short_window(module: Any) -> bool:
    config = module.config
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
