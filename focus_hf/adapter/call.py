"""What one call of an attention module needs to know about its routing, and how that gets to the attention function.

The attention interface passes no hidden states, but it does pass the module. While an adapter is on it, a module's
config is a `RoutedConfig`: it names our attention function for calls that are routed, and the base model's own for all
others. Which call that is belongs to whoever makes it (a thread, a task), never to the module.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..attention import Pattern
from .config import FocusConfig
from .layer import FocusLayer
from .remembered import Angles, Memory, Waiting


@dataclass
class Call:
    """A routed call of an attention module."""

    router: FocusLayer
    adapter: str  #: whose tensors
    pattern: Pattern  #: window, sinks, dense start, bands
    hidden: Tensor  #: ``(B, T, d)``, of the new tokens
    seen: int = 0  #: tokens before them that are cached
    dense: bool = False  #: every pair is attended: the base model's own attention answers, and is remembered
    alone: bool = False  #: window and sinks only (modes "local" and "window")
    #: Cosines and sines of the new tokens' positions, where the module is passed them.
    rotary: Angles | None = None
    position_ids: Tensor | None = None  #: of the new tokens, likewise
    cache_layer: Any = None  #: where the tokens are cached, if they are
    #: int16 ``(B, T, K)``, groups of each new token, the best first: of a routing that all heads share.
    ranking: Tensor | None = None
    assignments: Tensor | None = None  #: ``(B, T, K)`` with a gradient, set in training
    tensors: object = None  #: of the adapter, as they are now, see `FocusLayer.made_by`
    memory: Memory | None = None  #: what is remembered of the cached tokens
    untouched: bool = False  #: the cache is as it was left then
    #: What was found out about the keys of all tokens, to be remembered: with cells their groups, uint8 ``(B, H_kv,
    #: S)``; otherwise the ranking of all tokens.
    groups: Tensor | None = None
    complete: bool = False  #: it is known of every token
    waiting: Waiting = ()  #: with cells
    paged: Any = None  #: whose tokens are which, in continuous batching

    @property
    def config(self) -> FocusConfig:
        """Of the adapter."""
        return self.router.configs[self.adapter]


_CURRENT: ContextVar[dict[int, Call] | None] = ContextVar("focus_call", default=None)

#: While torch.compile traces (one call at a time), where there are no context variables.
_TRACED: dict[int, Call] = {}


def begin(router: FocusLayer, call: Call | None) -> None:
    """The call that this thread (or task) now makes of a module; whatever an interrupted one left is forgotten."""
    if torch.compiler.is_compiling():
        if call is None:
            _TRACED.pop(id(router), None)
        else:
            _TRACED[id(router)] = call
    elif call is not None or _CURRENT.get():
        _CURRENT.set(None if call is None else {id(router): call})


def current(router: FocusLayer) -> Call | None:
    """The call that this thread makes of a module, if it is routed."""
    if torch.compiler.is_compiling():
        return _TRACED.get(id(router))
    calls = _CURRENT.get()
    return None if calls is None else calls.get(id(router))


def start_call(router: FocusLayer, adapter: str, hidden: Tensor, kwargs: dict[str, Any]) -> Call:
    """A call in a layer's mode, of which nothing is known yet but the attention module's arguments."""
    pattern, rotary = router.configs[adapter].pattern, kwargs.get("position_embeddings")
    places = kwargs.get("position_ids")
    if router.mode == "window" and router.window is not None:
        pattern = replace(pattern, local_window=router.window)
    return Call(
        *(router, adapter, pattern, hidden),
        alone=router.mode in ("local", "window"),
        rotary=tuple(rotary) if isinstance(rotary, tuple | list) and len(rotary) == 2 else None,
        position_ids=places if isinstance(places, Tensor) else None,
    )


class RoutedConfig:
    """An attention module's own config, which names our function while a call of the module is routed."""

    def __init__(self, config: Any, router: FocusLayer) -> None:
        self.__dict__["original"], self.__dict__["router"] = config, router

    @property
    def _attn_implementation(self) -> str:
        call = current(self.router)
        return self.original._attn_implementation if call is None or call.dense else "focus"

    def __getattr__(self, name: str) -> Any:
        if name in ("original", "router"):  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.original, name, value)
