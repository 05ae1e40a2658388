"""The routing of a call: its tokens' groups, and what the cache remembers of earlier ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import routing
from ..attention import HARD_GATE
from .balance import balanced_assignments
from .cache import append_memberships, cache_layer, follows
from .call import Routing, SoftGate
from .decide import Decision, decide, dense_by_groups
from .layer import FocusLayer
from .masks import valid_tokens


def route(router: FocusLayer, adapter_name: str, hidden_states: Tensor, cache: Any, mask: Any) -> Routing | None:
    """The routing of a call, or ``None`` where it is dense (see `decide`).

    Args:
        router: of the attention module that is called.
        adapter_name: whose centroids.
        hidden_states: ``(B, T, d)``, of the new tokens.
        cache: the model's, or ``None``; it now remembers their groups.
        mask: what the base model made, if anything.
    """
    layer = None if cache is None else cache_layer(cache, router.get_base_layer().layer_idx)
    decision = decide(
        router.configs[adapter_name],
        router.mode,
        learns=router.learns(adapter_name),
        new_tokens=hidden_states.shape[1],
        cache_layer=layer,
    )
    if decision.soft:
        return None if decision.dense else _soft_routing(router, adapter_name, hidden_states, mask)
    if decision.dense and layer is None and router.observer is None:
        return None
    return _hard_routing(router, adapter_name, hidden_states, layer, decision)


@torch.no_grad()
def _hard_routing(
    router: FocusLayer, adapter_name: str, hidden_states: Tensor, layer: Any, decision: Decision
) -> Routing | None:
    """Inference. A dense call's groups are found all the same, for those who observe and for the cache."""
    config = router.configs[adapter_name]
    scores, balance = router(hidden_states, adapter_name)
    memberships = routing.hard_memberships(scores, balance, config.top_k)
    if router.mode == "local":
        memberships = torch.zeros_like(memberships)
    if router.observer is not None:
        router.observer(router, scores, memberships)
    dense = decision.dense
    in_stores = layer is not None and follows(layer, config.pattern, adapter_name, memberships.shape[0])
    if in_stores and dense:
        layer.restore()
        in_stores = False
    if layer is not None and not in_stores:
        memberships = append_memberships(layer, memberships, owner=adapter_name)
        dense = dense or dense_by_groups(config, memberships)
    if dense:
        return None
    if in_stores:
        layer.routed = True
    return Routing(
        config.pattern,
        memberships,
        config.top_k,
        router.path,
        router.kernel,
        cache_layer=None if _shares_keys(router) else layer,
        in_stores=in_stores,
        owner=adapter_name,
        attention_observer=None if (observer := router.attention_observer) is None else partial(observer, router),
    )


def _shares_keys(router: FocusLayer) -> bool:
    """Whether later layers read this layer's keys, as in Gemma 3n: they must then stay in their order."""
    return bool(getattr(router.get_base_layer().config, "num_kv_shared_layers", 0))


def _soft_routing(router: FocusLayer, adapter_name: str, hidden_states: Tensor, mask: Any) -> Routing:
    """Training."""
    config = router.configs[adapter_name]
    scores, balance = router(hidden_states, adapter_name)
    assignments = balanced_assignments(router, adapter_name, scores, balance, valid_tokens(mask))
    hard = routing.hard_memberships(scores.detach(), balance, config.top_k)
    if router.observer is not None:
        router.observer(router, scores.detach(), hard)
    if config.straight_through or config.gate == HARD_GATE:
        assignments = routing.straight_through(hard, assignments)
    strength = config.gate_strength if router.gate_strength is None else router.gate_strength
    soft = SoftGate(assignments, config.gate, strength)
    return Routing(config.pattern, hard, config.top_k, kernel=router.kernel, soft=soft)
