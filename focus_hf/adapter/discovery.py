"""Find the attention modules of a model and what they are, so that a new architecture works on the day it appears."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn


def find_attention(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules of ``model`` that compute attention through transformers' `AttentionInterface`, with their names.

    Looks at the names that the code of their classes' ``forward`` uses: there is no common base class.
    """
    for name, module in model.named_modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names:
            yield name, module


def why_not(name: str, module: Any, include_sliding: bool) -> str | None:
    """Why Focus cannot route an attention module, as the end of a sentence about it; ``None`` if it can.

    What is not known to give right results is refused: of layers whose pairs the architecture chooses by itself, only
    sliding windows can be routed, and only where that was asked for.

    Args:
        name: of the module in its model.
        module: it.
        include_sliding: sliding windows are to be routed.
    """
    code = _attention_call(module.__class__)
    # Who keeps keys for later tokens is causal, if they are the keys of its own tokens.
    if not hasattr(module, "is_causal") and (code.cache_slot is None or code.crosses):
        return "do not say whether they are causal"
    # BigBird-Pegasus says of its decoder only that it is one.
    of_decoder = getattr(module, "is_decoder", False) and name.endswith("self_attn")
    if not getattr(module, "is_causal", True) and not of_decoder:
        return NOT_CAUSAL
    if getattr(module, "is_cross_attention", False):
        return "attend to another sequence"
    if getattr(module, "config", None) is None or not (numbered(module) or code.cache_slot in _SLOTS):
        return "have no number or no configuration"
    if getattr(module, "is_kv_shared_layer", False):
        return "use the keys of another layer"
    if code.cache_slot is not None and code.cache_slot != _OWN_SLOT and code.cache_slot not in _SLOTS:
        return f"keep their keys in a slot of the cache of their own choosing ({code.cache_slot})"
    kind = _layer_type(module)
    unused = INDICES if kind == "full_attention" and getattr(module, "indexer", None) is None else ()
    if foreign := [name for name in code.foreign if name not in unused]:
        return f"hand {', '.join(foreign)} to the attention function, which Focus does not know"
    # transformers before 5.21 gives Gemma-2 SDPA by default, which leaves out what the model was trained with.
    if getattr(module, "attn_logit_softcapping", None) and module.config._attn_implementation == "sdpa":
        return 'lose the soft-capping of their scores with SDPA: load the base model with attn_implementation="eager"'
    if kind not in (None, *EVERYTHING, *SLIDING):
        return f"choose the tokens that they attend to by themselves (layer type {kind!r})"
    if _limits(module.config, getattr(module, "keep_window_size", None)):
        return f"choose the {module.keep_window_size} tokens that they attend to by themselves (keep_window_size)"
    return IS_SLIDING if not include_sliding and slides(module) else None


def slides(module: Any) -> bool:
    """Whether the architecture gives this attention module a sliding window."""
    kind = _layer_type(module)
    if kind is not None:
        return kind in SLIDING
    return _limits(module.config, getattr(module, "sliding_window", getattr(module.config, "sliding_window", None)))


def numbered(module: Any) -> bool:
    """Whether an attention module has a number of its own, which is also its slot of the cache.

    Not so where the model runs it several times, each time with another slot (Zamba, HRM).
    """
    own = getattr(module, "layer_idx", None)
    return own is not None and _attention_call(module.__class__).cache_slot not in _SLOTS


def layer_numbers(model: nn.Module) -> dict[str, int]:
    """The numbers by which an adapter knows the attention modules of a model, by name.

    Their own; of those that have none, their rank among these.
    """
    attention: dict[str, Any] = dict(find_attention(model))
    unnumbered = [name for name, module in attention.items() if not numbered(module)]
    return {n: int(m.layer_idx) if numbered(m) else unnumbered.index(n) for n, m in attention.items()}


def slot_by_call(module: Any) -> SlotOfCall | None:
    """What tells in which layer of the cache a module keeps the keys of a call; ``None``: that of its own number."""
    return _SLOTS.get(str(_attention_call(module.__class__).cache_slot))


def input_width(module: Any) -> int:
    """Width of the hidden states that enter an attention module (Zamba's: two of them side by side)."""
    return int(getattr(module, "attention_hidden_size", None) or module.config.hidden_size)


def head_shape(modules: Sequence[Any]) -> dict[str, int]:
    """Key/value heads, query heads and the size of a head, which routing by cells needs before it has seen them.

    Raises:
        ValueError: the modules do not say, or they differ.
    """
    found = {_shape(module) for module in modules}
    keys, queries, size = found.pop() if len(found) == 1 else (None, None, None)
    if keys is None or queries is None or size is None or queries % keys:
        raise ValueError(
            f"The layers of {type(modules[0]).__name__} do not have one number and size of heads that their "
            "configuration names, which routing='cells' needs. Use routing='shared'."
        )
    return {"key_value_heads": keys, "query_heads": queries, "head_dim": size}


def _shape(module: Any) -> tuple[int | None, int | None, int | None]:
    config = module.config
    queries = _first(config, "num_attention_heads", "n_head")
    keys = _first(config, "num_key_value_heads") or queries
    size = _first(module, "head_dim", "head_size")
    if size is None and queries is not None:
        width = _first(config, "hidden_size", "n_embd")
        size = _first(config, "head_dim") or (None if width is None else width // queries)
    return keys, queries, size


def _first(where: Any, *names: str) -> int | None:
    return next((value for name in names if isinstance(value := getattr(where, name, None), int)), None)


#: From an attention module and the arguments of a call, by name, to a layer of the cache.
SlotOfCall = Callable[[Any, Mapping[str, Any]], int]


def _told(module: Any, call: Mapping[str, Any]) -> int:
    return int(call["layer_idx"])


def _in_cycle(module: Any, call: Mapping[str, Any]) -> int:
    return int(module.layer_idx) + int(call.get("cycle_offset", 0))


#: Where attention modules keep their keys in the cache, as their source says it: under their own number, or under
#: another one in each call, by its arguments.
_OWN_SLOT = "self.layer_idx"
_SLOTS: dict[str, SlotOfCall] = {"layer_idx": _told, "self.layer_idx + cycle_offset": _in_cycle}

#: Types of layers, in a configuration's ``layer_types``, that attend to everything, and to a sliding window.
EVERYTHING, SLIDING = ("full_attention", "attention", "hybrid"), ("sliding_attention", "hybrid_sliding")

#: What layers hand to the attention function that attend to tokens of their own choice.
INDICES = ("indices", "block_indices")

#: Reasons that `targets` has advice for.
NOT_CAUSAL, IS_SLIDING = "are not causal", "use a sliding window by design"

#: What attention functions are told by name, and Focus honours or need not.
_KNOWN = {"attention_mask", "dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal", "deterministic"}
_KNOWN |= {"position_bias", "sinks"}
_KNOWN |= {"output_attentions", "position_ids", "layer_idx", "cache_position", "query", "key", "value"}
_KNOWN |= {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "head_mask", "use_cache"}


class _AttentionCall(NamedTuple):
    """What the source of an attention module says."""

    cache_slot: str | None  #: the expression for the layer of the cache in which it keeps its keys, if it has one
    foreign: tuple[str, ...]  #: names of arguments to the attention function that Focus does not know
    crosses: bool  #: it can be handed another sequence


@functools.cache
def _attention_call(module_class: Any) -> _AttentionCall:
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(module_class.forward)))
    except (OSError, TypeError):  # no source to read
        return _AttentionCall(None, (), False)
    slot, foreign = None, set()
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        function = ast.unparse(call.func)
        if function == "attention_interface":
            foreign |= {keyword.arg for keyword in call.keywords if keyword.arg is not None} - _KNOWN
        elif function.endswith(".update") and "past" in function and len(call.args) >= 3:
            slot = ast.unparse(call.args[2])
    arguments = inspect.signature(inspect.unwrap(module_class.forward)).parameters
    crosses = any(name.startswith(("cross_attention", "encoder_", "key_value_states")) for name in arguments)
    return _AttentionCall(slot, tuple(sorted(foreign)), crosses)


def _layer_type(module: Any) -> str | None:
    """What the configuration calls this layer, if it says."""
    types = getattr(module.config, "layer_types", None)
    if not types or not numbered(module) or module.layer_idx >= len(types):
        return None
    return types[module.layer_idx]


def _limits(config: Any, window: int | None) -> bool:
    """Whether a window is shorter than the longest context (that of Phi-3-mini-128k is not, and limits nothing)."""
    return window is not None and window < (getattr(config, "max_position_embeddings", None) or window + 1)
