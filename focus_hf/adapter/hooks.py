"""The hooks by which an attention module follows its router, for the length of one call."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ..escape import shown
from ..records.adapter_files import ROUTER
from .call import Call, RoutedConfig, begin, current, start_call
from .discovery import slot_by_call
from .engines.continuous import route_pages
from .engines.pages import find_pages
from .growing import make_growing
from .layer import FocusLayer
from .masks import valid_tokens
from .remembered import cache_layer, find_cache, recall, remember
from .routers import choose_groups, rank_all
from .training import assignments_of, is_soft


def add_router(router: FocusLayer) -> None:
    """Let an attention module follow its router, as its child, until `remove_router`."""
    attention = router.get_base_layer()
    attention.add_module(ROUTER, router)
    hooks = _Hooks(router, attention)
    attention.config = RoutedConfig(attention.config, router)
    router.hooks = [
        attention.register_forward_pre_hook(hooks.before, with_kwargs=True),
        attention.register_forward_hook(hooks.after, always_call=True),
    ]


def remove_router(router: FocusLayer) -> None:
    """The attention module as it was before `add_router`."""
    attention = router.get_base_layer()
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
        if (pages := find_pages(kwargs)) is not None:  # also where nothing is routed: its tokens then have no groups
            return route_pages(router, hidden, pages, kwargs)
        name = router.routing_adapter
        if name is None or router.mode == "dense":
            return None
        refuse_mixed_batch(kwargs.get("adapter_names"), [name])
        call = start_call(router, name, hidden, kwargs)
        cache = find_cache((*args, *kwargs.values()))
        if cache is not None:
            slot = router.layer_idx
            if self.slot_by_call is not None:
                given = signature(attention.forward).bind_partial(*args, **kwargs)
                slot = self.slot_by_call(attention, given.arguments)
            _continue_cache(call, cache_layer(cache, slot))
        is_long = call.seen + hidden.shape[1] > call.pattern.dense_length
        if is_soft(call) and is_long:
            scores, balance = router(hidden, name)
            call.assignments = assignments_of(call, scores, balance, valid_tokens(kwargs.get("attention_mask")))
            choose_groups(call, scores, balance)  # a cache remembers those that inference would have
            return call
        call.dense = not router.is_observed and (not is_long or (call.config.is_dense and not call.alone))
        if call.dense and cache is None:
            return None
        if cache is not None and not call.dense:
            make_growing(cache, call.cache_layer)
        if not (call.config.by_cells or (call.alone and cache is None)):
            with torch.no_grad():
                choose_groups(call, *router(hidden, name))
        return call

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
        remember(call.cache_layer, call.adapter, call.tensors, call.groups, length, call.complete, call.waiting)


def _continue_cache(call: Call, layer: Any) -> None:
    """Find out what is known of the tokens in a cache's layer, which will keep the new ones, too.

    Raises:
        ValueError: a sliding layer would continue a cache that keeps everything, whose mask cannot be told from one
            that hides padding.
    """
    router, call.cache_layer, call.tensors = call.router, layer, call.router.made_by(call.adapter)
    call.memory, call.untouched = recall(layer, call.adapter, call.tensors)
    call.seen = call.memory.length if call.memory is not None and call.untouched else int(layer.get_seq_length())
    if router.slides and call.seen and not getattr(layer, "is_sliding", False):
        raise ValueError(
            f"{router.name} has a sliding window, and this cache keeps everything: Focus cannot continue it. Use the "
            "model's own cache, DynamicCache(config=model.config)."
        )
