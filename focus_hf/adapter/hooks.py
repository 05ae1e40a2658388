"""The hooks by which an attention module follows its router, for the length of one call."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

from ..escape import shown
from .cache import find_cache
from .call import RoutedConfig
from .layer import FocusLayer
from .route import route


def add_hooks(attention: nn.Module, router: FocusLayer) -> None:
    """Let an attention module follow a router until `FocusLayer.remove`."""
    hooks = _Hooks(router)
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

    def __init__(self, router: FocusLayer) -> None:
        self.router = router

    def before(self, attention: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        adapter_name = self.router.routing_adapter
        if adapter_name is None or self.router.mode == "dense":
            return
        if "read_index" in kwargs or "block_table" in kwargs:  # what its paged cache hands to attention modules
            raise ValueError(
                "Focus does not route continuous batching (generate_batch, paged caches): its output would be wrong. "
                "Use generate(), or switch the adapter off."
            )
        refuse_mixed_batch(kwargs.get("adapter_names"), [adapter_name])
        hidden_states = args[0] if args else kwargs["hidden_states"]
        cache = find_cache((*args, *kwargs.values()))
        call = route(self.router, adapter_name, hidden_states, cache, kwargs.get("attention_mask"))
        if call is not None:
            attention.config = RoutedConfig(attention.config, call)

    def after(self, attention: Any, args: tuple, output: Any) -> None:
        if isinstance(attention.config, RoutedConfig):
            attention.config = attention.config.original
