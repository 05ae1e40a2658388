"""The hooks by which an attention module follows its router, for the length of one call."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from inspect import signature
from typing import Any

from torch import Tensor, nn

from ..escape import shown
from .cache import find_cache
from .call import Dense, OneTokenRouting, RoutedConfig, Routing
from .continuous import route_pages
from .discovery import slot_by_call
from .layer import FocusLayer
from .one_token import route_one_token
from .pages import find_pages
from .route import route


def add_hooks(attention: nn.Module, router: FocusLayer) -> None:
    """Let an attention module follow a router until `FocusLayer.remove`."""
    hooks = _Hooks(router, attention)
    router.hooks = [
        attention.register_forward_pre_hook(hooks.before, with_kwargs=True),
        attention.register_forward_hook(hooks.after, always_call=True),
    ]


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
        hidden_states = args[0] if args else kwargs["hidden_states"]
        call: Routing | OneTokenRouting | Dense | None = self._one_token(hidden_states, args, kwargs)
        if call is None:
            call = self._tokens(attention, hidden_states, args, kwargs)
        if call is not None and call is not Dense.CALL:
            _set_config(attention, RoutedConfig(attention.config, call))

    def _one_token(self, hidden_states: Tensor, args: tuple, kwargs: dict[str, Any]) -> OneTokenRouting | Dense | None:
        """The short way of what happens most: one new token of each sequence, and nothing else to be heeded."""
        if hidden_states.shape[1] != 1 or self.slot_by_call is not None or kwargs.get("attention_mask") is not None:
            return None
        cache = find_cache((*args, *kwargs.values()))
        if cache is None or kwargs.get("adapter_names") is not None:
            return None
        return route_one_token(self.router, hidden_states, cache)

    def _tokens(self, attention: Any, hidden_states: Tensor, args: tuple, kwargs: dict[str, Any]) -> Routing | None:
        adapter_name = self.router.routing_adapter
        paged = find_pages(kwargs) is not None
        if (adapter_name is None or self.router.mode == "dense") and not paged:
            return None
        if paged:  # also where nothing is routed: its tokens are then known to have no groups
            return route_pages(self.router, hidden_states, kwargs)
        refuse_mixed_batch(kwargs.get("adapter_names"), [str(adapter_name)])
        cache = find_cache((*args, *kwargs.values()))
        slot = self.router.layer_idx if self.slot_by_call is None else self._slot(attention, args, kwargs)
        return route(self.router, str(adapter_name), hidden_states, cache, slot, kwargs.get("attention_mask"))

    def _slot(self, attention: Any, args: tuple, kwargs: dict[str, Any]) -> int:
        assert self.slot_by_call is not None
        return self.slot_by_call(attention, signature(attention.forward).bind_partial(*args, **kwargs).arguments)

    def after(self, attention: Any, args: tuple, output: Any) -> None:
        if isinstance(attention.config, RoutedConfig):
            _set_config(attention, attention.config.original)


def _set_config(attention: Any, config: Any) -> None:
    """``attention.config = config`` without torch's search among parameters and modules, for every call."""
    if "config" in attention.__dict__:
        attention.__dict__["config"] = config
    else:
        attention.config = config
