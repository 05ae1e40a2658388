"""The hooks by which an attention module follows its router, for the length of one call."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ..escape import shown
from ..records.adapter_files import ROUTER
from .call import Call, RoutedConfig, begin, current, pattern_in_mode, positions_of
from .discovery import slot_by_call
from .engines.continuous import find_pages, route_pages
from .growing import make_growing
from .layer import FocusLayer
from .masks import valid_tokens
from .remembered import cache_layer, find_cache, recall, remember, tokens_seen
from .routers import choose_groups, rank_all
from .training import assignments_of, is_soft


def add_router(attention: Any, router: FocusLayer) -> None:
    """Let an attention module follow a router, as its child, until `remove_router`."""
    attention.add_module(ROUTER, router)
    hooks = _Hooks(router, attention)
    attention.config = RoutedConfig(attention.config, router)
    router.hooks = [
        attention.register_forward_pre_hook(hooks.before, with_kwargs=True),
        attention.register_forward_hook(hooks.after, always_call=True),
    ]


def remove_router(attention: Any, router: FocusLayer) -> None:
    """The attention module as it was before `add_router`."""
    delattr(attention, ROUTER)
    for handle in router.hooks:
        handle.remove()
    if isinstance(attention.config, RoutedConfig):
        attention.config = attention.config.original


def refuse_mixed_batch(names: Iterable[str] | None, active: Collection[str]) -> None:
    """Refuse a call whose rows are to follow adapters (PEFT's ``adapter_names``) other than the active ones.

    Raises:
        ValueError: there is another one.
    """
    others = sorted(set(names or ()) - set(active))
    if others:
        raise ValueError(
            f"adapter_names: a batch cannot mix Focus adapters, and {shown(others[0])} is not the active one. Call "
            "the model once for each adapter, after set_adapter()."
        )


class _Hooks:
    """Methods and not closures, so that a model can be copied and pickled."""

    def __init__(self, router: FocusLayer, attention: nn.Module) -> None:
        self.router = router
        self.slot_by_call = slot_by_call(attention)

    def before(self, attention: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        begin(self.router, None)  # should this raise, the call before it is over all the same
        begin(self.router, self._call(attention, args, kwargs))

    def _call(self, attention: Any, args: tuple, kwargs: dict[str, Any]) -> Call | None:
        router, hidden = self.router, args[0] if args else kwargs["hidden_states"]
        if find_pages(kwargs) is not None:  # also where nothing is routed: its tokens are then known to have no groups
            return route_pages(router, hidden, kwargs)
        name = router.routing_adapter
        if name is None or router.mode == "dense":
            return None
        refuse_mixed_batch(kwargs.get("adapter_names"), [name])
        cache = find_cache((*args, *kwargs.values()))
        layer = None
        if cache is not None:
            slot = router.layer_idx if self.slot_by_call is None else self._slot(attention, args, kwargs)
            layer = cache_layer(cache, slot)
        call = self._start(name, hidden, layer, kwargs)
        if is_soft(router, name, cached_tokens=call.seen) and call.seen + hidden.shape[1] > call.pattern.dense_length:
            call.dense = False
            scores, balance = router(hidden, name)
            call.assignments = assignments_of(call, scores, balance, valid_tokens(kwargs.get("attention_mask")))
            choose_groups(call, scores, balance)  # a cache remembers those that inference would have
            return call
        if router.is_observed:
            call.dense = False
        if call.dense and layer is None:
            return None
        if cache is not None and not call.dense:
            make_growing(cache, layer)
        if not (call.config.by_cells or (call.alone and layer is None)):
            with torch.no_grad():
                choose_groups(call, *router(hidden, name))
        return call

    def _start(self, name: str, hidden: Tensor, layer: Any, kwargs: dict[str, Any]) -> Call:
        router = self.router
        config, tensors = router.configs[name], router.made_by(name)
        pattern, alone = pattern_in_mode(router, config)
        memory, untouched, seen = None, False, 0
        if layer is not None:
            memory, untouched = recall(layer, name, tensors)
            seen = memory.length if memory is not None and untouched else tokens_seen(layer)
            _refuse_whole_cache(router, layer, seen)
        everything = config.is_dense and not alone
        dense = everything or seen + hidden.shape[1] <= pattern.dense_length
        return Call(
            *(router, name, pattern, hidden, seen, dense, alone),
            **positions_of(kwargs),
            cache_layer=layer,
            tensors=tensors,
            memory=memory,
            untouched=untouched,
        )

    def _slot(self, attention: Any, args: tuple, kwargs: dict[str, Any]) -> int:
        assert self.slot_by_call is not None
        return self.slot_by_call(attention, signature(attention.forward).bind_partial(*args, **kwargs).arguments)

    def after(self, attention: Any, args: tuple, output: Any) -> None:
        call = current(self.router)
        begin(self.router, None)
        if call is None or call.cache_layer is None or output is None:
            return
        if call.ranking is not None and call.groups is None:
            keys = getattr(call.cache_layer, "keys", None)
            known = keys if isinstance(keys, Tensor) and keys.dim() == 4 else call.ranking[:, None]
            rank_all(call, known)
        length = call.seen + call.hidden.shape[1]
        remember(call.cache_layer, call.adapter, call.tensors, call.groups, length, call.complete)


def _refuse_whole_cache(router: FocusLayer, layer: Any, seen: int) -> None:
    """A sliding layer's mask over a cache that keeps everything cannot be told from one that hides padding.

    Raises:
        ValueError: the call would continue such a cache.
    """
    if getattr(layer, "is_sliding", False) or not router.slides or not seen:
        return
    raise ValueError(
        f"{router.name} has a sliding window, and this cache keeps everything: Focus cannot continue it. Use the "
        "model's own cache, DynamicCache(config=model.config)."
    )
