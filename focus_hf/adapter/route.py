"""The routing of a call: its tokens' groups, and what the cache remembers of earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import routing
from ..attention import HARD_GATE, HeadClass, HeadClasses, Pattern, WhoAttends
from .balance import balanced_assignments
from .cache import cache_layer, tokens_seen
from .call import Routing, SoftGate
from .decide import Decision, decide, dense_by_groups, window_of
from .heads import HeadScores, head_classes, key_scores, own_groups, shared_columns, top_ks_by_head
from .layer import FocusLayer, StandIn
from .masks import valid_tokens
from .remembered import append_memberships
from .stored import follows


def route(
    router: FocusLayer, adapter_name: str, hidden_states: Tensor, cache: Any, slot: int, mask: Any
) -> Routing | None:
    """The routing of a call, or ``None`` where it is dense (see `decide`).

    Args:
        router: of the attention module that is called.
        adapter_name: whose centroids.
        hidden_states: ``(B, T, d)``, of the new tokens.
        cache: the model's, or ``None``; it now remembers their groups.
        slot: which of its layers the attention module keeps its keys in.
        mask: what the base model made, if anything.
    """
    layer = None if cache is None else cache_layer(cache, slot)
    _refuse_whole_cache(router, layer)
    config = router.configs[adapter_name]
    classes = None if config.plain else head_classes(config, router.layer_idx)
    window = window_of(config, router.mode, router.window)
    decision = decide(
        config,
        router.mode,
        learns=router.learns(adapter_name, starts=layer is None or not tokens_seen(layer)),
        new_tokens=hidden_states.shape[1],
        cache_layer=layer,
        classes=classes,
        width=router.window,
    )
    if decision.soft and not decision.dense:
        return _soft_routing(router, adapter_name, hidden_states, mask, layer)
    if decision.dense and layer is None and router.observer is None and router.pairs_observer is None:
        return None
    if classes is not None and window is None:
        return _routing_by_class(router, adapter_name, hidden_states, layer, decision, classes)
    return _hard_routing(router, adapter_name, hidden_states, layer, decision, window)


def _refuse_whole_cache(router: FocusLayer, layer: Any) -> None:
    """A sliding layer's mask over a cache that keeps everything cannot be told from one that hides padding.

    Raises:
        ValueError: the call would continue such a cache.
    """
    if layer is None or getattr(layer, "is_sliding", False) or not router.slides or not tokens_seen(layer):
        return
    raise ValueError(
        f"{router.name} has a sliding window, and this cache keeps everything: Focus cannot continue it. Use the "
        "model's own cache, DynamicCache(config=model.config)."
    )


@torch.no_grad()
def _hard_routing(
    router: FocusLayer,
    adapter_name: str,
    hidden_states: Tensor,
    layer: Any,
    decision: Decision,
    window: Pattern | None,
) -> Routing | None:
    """Inference. A dense call's groups are found all the same, for those who observe and for the cache."""
    config = router.configs[adapter_name]
    pattern = config.pattern if window is None else window
    groups_each = config.top_k if window is None else 0
    if config.routing == "per_head":  # in a mode without groups: there are none that all heads share
        memberships = torch.zeros(*hidden_states.shape[:2], 1, dtype=torch.bool, device=hidden_states.device)
    else:
        scores, balance = _shared_scores(router, adapter_name, hidden_states, layer)
        memberships = routing.hard_memberships(scores, balance, config.top_k)
        if window is not None:
            memberships = torch.zeros_like(memberships)
    if router.observer is not None and config.routing == "shared":
        router.observer(router, scores, memberships)
    _tell_pairs(router, pattern, memberships)
    dense = decision.dense
    in_stores = layer is not None and follows(layer, pattern, adapter_name, memberships.shape[0])
    if in_stores and dense:
        layer.restore()
        in_stores = False
    if layer is not None and not in_stores:
        memberships = append_memberships(layer, memberships, adapter_name, groups_each)
        groups_each = layer.groups_each
        dense = dense or dense_by_groups(config, memberships, groups_each)
    if dense:
        return None
    if in_stores:
        layer.routed = True
    return Routing(
        pattern,
        memberships,
        config.top_k,
        router.path,
        router.kernel,
        cache_layer=None if router.shares_keys else layer,
        in_stores=in_stores,
        owner=adapter_name,
        groups_each=groups_each,
        attention_observer=_attention_observer(router, None),
    )


@torch.no_grad()
def _routing_by_class(
    router: FocusLayer,
    adapter_name: str,
    hidden_states: Tensor,
    layer: Any,
    decision: Decision,
    classes: HeadClasses,
) -> Routing | None:
    """Inference where a layer's heads do not all attend alike. The cache remembers the columns of all classes."""
    config = router.configs[adapter_name]
    groups_each = 1 if config.routing == "per_head" else None  # of each head
    if decision.dense and groups_each and not _looked_at(router):
        memberships, reads = _own_columns(router, adapter_name, hidden_states), None
    else:
        memberships, reads = _columns(router, adapter_name, hidden_states, layer)
    _tell_pairs(router, config.pattern, memberships, reads, classes)
    owner, in_stores = (adapter_name, memberships.shape[-1]), False
    if layer is not None:
        in_stores = not decision.dense and follows(layer, config.pattern, owner, memberships.shape[0], classes)
        if not in_stores:
            layer.restore()
            memberships = append_memberships(layer, memberships, owner, groups_each)
            groups_each = layer.groups_each
    if decision.dense:
        return None
    if in_stores:
        layer.routed = True
    return Routing(
        config.pattern,
        memberships,
        config.top_k,
        router.path,
        router.kernel,
        cache_layer=None if router.shares_keys else layer,
        in_stores=in_stores,
        owner=owner,
        classes=classes,
        reads=reads,
        groups_each=groups_each,
        attention_observer=_attention_observer(router, reads),
    )


def _shared_scores(router: FocusLayer, adapter_name: str, hidden_states: Tensor, layer: Any) -> tuple[Tensor, Tensor]:
    """Scores ``(B, T, K)`` and balance ``(K,)``: the adapter's, or those that it is compared with."""
    if router.stand_in is None:
        return router(hidden_states, adapter_name)
    scores = _stand_in_scores(router, router.stand_in, hidden_states, layer, num_heads=1)[:, :, 0]
    return scores, scores.new_zeros(scores.shape[-1])


def _stand_in_scores(
    router: FocusLayer, stand_in: StandIn, hidden_states: Tensor, layer: Any, num_heads: int
) -> Tensor:
    """``(B, T, num_heads, K)``."""
    start = 0 if layer is None else tokens_seen(layer)
    scores = stand_in(router.layer_idx, num_heads, start, hidden_states.shape[1]).to(hidden_states.device)
    return scores.expand(hidden_states.shape[0], -1, -1, -1)


def _columns(router: FocusLayer, adapter_name: str, hidden_states: Tensor, layer: Any) -> tuple[Tensor, Tensor | None]:
    """Memberships of new tokens for all classes of heads, and the groups that they read: bool ``(B, T, columns)``."""
    config = router.configs[adapter_name]
    if config.routing == "shared":
        scores, balance = _shared_scores(router, adapter_name, hidden_states, layer)
        if router.observer is not None:
            router.observer(router, scores, routing.hard_memberships(scores, balance, config.top_k))
        return shared_columns(config, router.layer_idx, scores, balance), None
    by_head = router.head_scores(hidden_states, adapter_name)
    top_ks = top_ks_by_head(config, router.layer_idx)
    if by_head is None or not top_ks:
        return _no_columns(hidden_states), _no_columns(hidden_states)
    if router.stand_in is not None:
        scores = _stand_in_scores(router, router.stand_in, hidden_states, layer, by_head.keys.shape[-2])
        by_head = HeadScores(scores, scores)
    memberships, reads = by_head.memberships(), by_head.reads(top_ks)
    if router.observer is not None:
        for place, head in enumerate(config.heads_with_groups(router.layer_idx)):
            view = router.head_view(head, reads[:, :, place])
            router.observer(view, by_head.keys[:, :, place], memberships[:, :, place])
    return memberships.flatten(-2), reads.flatten(-2)


def _looked_at(router: FocusLayer) -> bool:
    """Whether somebody is told of the routing, or stands in for it."""
    return any((router.observer, router.pairs_observer, router.stand_in))


def _own_columns(router: FocusLayer, adapter_name: str, hidden_states: Tensor) -> Tensor:
    """The first of `_columns` with routing per head: what a dense call leaves for later ones."""
    if not router.configs[adapter_name].heads_with_groups(router.layer_idx):
        return _no_columns(hidden_states)
    return own_groups(key_scores(hidden_states, router.head_routers(adapter_name))).flatten(-2)


def _no_columns(hidden_states: Tensor) -> Tensor:
    """Of a layer without groups: bool ``(B, T, 0)``."""
    return torch.zeros(*hidden_states.shape[:2], 0, dtype=torch.bool, device=hidden_states.device)


def _attention_observer(router: FocusLayer, reads: Tensor | None) -> Callable[..., None] | None:
    """Who is told of an attention call: by head, where each routes by itself."""
    observer = router.attention_observer
    if observer is None or reads is None:
        return None if observer is None else partial(observer, router)
    width = router.routing_config.num_groups
    heads = router.routing_config.heads_with_groups(router.layer_idx)

    def tell(query: Tensor, key: Tensor, scale: float, memberships: Tensor) -> None:
        repeat = query.shape[1] // key.shape[1]
        for place, head in enumerate(heads):
            own = slice(place * width, (place + 1) * width)
            queries, keys = query[:, head * repeat : (head + 1) * repeat], key[:, head : head + 1]
            observer(router.head_view(head, reads[..., own]), queries, keys, scale, memberships[..., own])

    return tell


def _tell_pairs(
    router: FocusLayer,
    pattern: Pattern,
    memberships: Tensor,
    reads: Tensor | None = None,
    classes: Sequence[HeadClass] | None = None,
) -> None:
    """Tell who observes pairs which of the call's own tokens attend to which."""
    if router.pairs_observer is not None:
        batch, length, _ = memberships.shape
        positions = torch.arange(length, device=memberships.device).expand(batch, length)
        router.pairs_observer(WhoAttends(pattern, positions, memberships, reads=reads), classes)


def _soft_routing(router: FocusLayer, adapter_name: str, hidden_states: Tensor, mask: Any, layer: Any) -> Routing:
    """Training. A cache remembers the groups that inference would have."""
    config = router.configs[adapter_name]
    scores, balance = router(hidden_states, adapter_name)
    assignments = balanced_assignments(router, adapter_name, scores, balance, valid_tokens(mask))
    hard = routing.hard_memberships(scores.detach(), balance, config.top_k)
    if router.observer is not None:
        router.observer(router, scores.detach(), hard)
    _tell_pairs(router, config.pattern, hard)
    if layer is not None:
        append_memberships(layer, hard, owner=adapter_name)
    if config.straight_through or config.gate == HARD_GATE:
        assignments = routing.straight_through(hard, assignments)
    strength = config.gate_strength if router.gate_strength is None else router.gate_strength
    soft = SoftGate(assignments, config.gate, strength)
    return Routing(config.pattern, hard, config.top_k, kernel=router.kernel, soft=soft, groups_each=config.top_k)
