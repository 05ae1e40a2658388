"""The routing of one new token for each sequence, where nothing more is asked than where it may look.

What every layer does at every decoded token is told in as few operations as it takes: a token's groups are numbers,
and of earlier tokens nothing is moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..attention import (
    HeadClasses,
    Pattern,
    TokenByNumbers,
    TokenByRows,
    Windows,
    keeps,
    nothing_read,
    starts_as_scores,
)
from ..ranks import several
from .cache import cache_layer, tokens_seen
from .call import Dense, OneTokenRouting, Routing
from .config import FocusConfig
from .decide import any_two_share
from .heads import HeadRouters, head_classes, query_scores
from .last_tokens import Routed, Unrouted
from .layer import FocusLayer
from .remembered import routed_tokens, unrouted_tokens


def route_one_token(router: FocusLayer, hidden_states: Tensor, cache: Cache) -> OneTokenRouting | Dense | None:
    """The routing of a call with one new token for each sequence, or ``None``, and nothing has happened, where more is
    asked. A call that is dense has none, but its token is remembered.

    Args:
        router: of the attention module that is called.
        hidden_states: ``(B, 1, d)``.
        cache: the model's.
    """
    single = _single_tokens(router, hidden_states)
    if single is None:
        return None
    layer = cache_layer(cache, router.layer_idx)
    if layer.store is not None or layer.must_store or not layer.keeps_all:
        return None
    if tokens_seen(layer) < single.dense_length:
        return Dense.CALL if single.remember(router, hidden_states, layer) is not None else None
    return single.route(router, hidden_states, layer)


def _single_tokens(router: FocusLayer, hidden_states: Tensor) -> SingleTokens | None:
    """What the calls of a layer that have one token for each sequence need; ``None`` if such a call is like any other.

    It is made once, and anew when a setting of the layer or its adapter was given another value.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or several():
        return None
    kept: SingleTokens | None = router.__dict__["for_single_tokens"]
    if kept is not None and kept.version is kept.config.version and kept.device == hidden_states.device:
        return kept
    adapter_name = router.routing_adapter if _is_simple(router) else None
    if adapter_name is None:
        return None
    made = _prepare(router, adapter_name, router.configs[adapter_name], hidden_states)
    if keeps(hidden_states):
        router.__dict__["for_single_tokens"] = made
    return made


def _is_simple(router: FocusLayer) -> bool:
    """Nobody looks on, nothing else was asked for, and the layer's keys are its own and stay in their order."""
    if router.mode not in (None, "hard") or router.disable_adapters:
        return False
    observed = router.observer or router.attention_observer or router.pairs_observer or router.stand_in
    chosen = router.path != "auto" or router.kernel is not None
    return observed is None and not chosen and not router.shares_keys and not router.slides


def _prepare(router: FocusLayer, name: str, config: FocusConfig, like: Tensor) -> SingleTokens | None:
    if config.plain:
        if any_two_share(config.top_k, config.num_groups):
            return None
        router.check_finite(name)
        return _Shared.of(name, config, like)
    if config.routing == "per_head" and config.heads_with_groups(router.layer_idx):
        return _PerHead.of(name, config, router.layer_idx, like)
    return None


@dataclass(frozen=True, eq=False)
class SingleTokens:
    """What follows from the settings of a layer, for its calls with one new token for each sequence.

    Args:
        adapter_name, config: of the adapter.
        version: of the configuration.
        device: where the tokens are.
        owner: see `Routing`.
        dense_length: so many tokens are dense attention.
    """

    adapter_name: str
    config: FocusConfig
    version: object
    device: torch.device
    owner: object
    dense_length: int

    def remember(self, router: FocusLayer, hidden_states: Tensor, layer: Any) -> Any:
        """Let the cache remember the tokens of a call; ``None``, and nothing has happened, where it is not known in
        which groups earlier tokens are."""
        raise NotImplementedError

    def route(self, router: FocusLayer, hidden_states: Tensor, layer: Any) -> OneTokenRouting | None:
        """The routing of a call, and what `remember` does."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class _Shared(SingleTokens):
    """With one routing for all heads.

    Args:
        pattern: of all heads.
    """

    pattern: Pattern

    @classmethod
    def of(cls, name: str, config: FocusConfig, like: Tensor) -> _Shared:
        pattern = config.pattern
        return cls(name, config, config.version, like.device, name, pattern.dense_length, pattern)

    def remember(self, router: FocusLayer, hidden_states: Tensor, layer: Any) -> tuple[Routed, Tensor] | None:
        """Where the tokens were taken in, and their groups, int64 ``(B, k)``."""
        config, batch = self.config, hidden_states.shape[0]
        last = routed_tokens(layer, batch, self.owner, config.num_groups, config.top_k, self.pattern)
        if last is None:
            return None
        scores = router.balanced_scores(hidden_states.flatten(0, 1), self.adapter_name)
        own = scores.topk(config.top_k, dim=-1).indices
        last.append(own.unsqueeze(1))
        return last, own

    def route(self, router: FocusLayer, hidden_states: Tensor, layer: Any) -> OneTokenRouting | None:
        remembered = self.remember(router, hidden_states, layer)
        if remembered is None:
            return None
        last, own = remembered
        spelled_out = partial(_spelled_out, layer, self.config, self.owner, None, None)
        token = TokenByRows(last.rows, own, last.shape[1])
        return OneTokenRouting(token, self.pattern, layer, None, self.config.top_k, spelled_out)


@dataclass(frozen=True, eq=False)
class _PerHead(SingleTokens):
    """With a routing for each head that has centroids.

    Args:
        windows: of all heads.
        nothing: float32 ``(P, K)``, of a token that reads no group.
        classes: of all heads.
        starts: float32 ``(P, largest top_k)``, the best group first: 0 for those that a head reads, else ``-inf``.
        window: the narrowest of those heads that read any.
    """

    windows: Windows
    nothing: Tensor
    classes: HeadClasses
    starts: Tensor
    window: int

    @classmethod
    def of(cls, name: str, config: FocusConfig, layer_idx: int, like: Tensor) -> _PerHead:
        heads, classes = config.heads_with_groups(layer_idx), head_classes(config, layer_idx)
        patterns = [config.head_pattern(layer_idx, head) for head in heads]
        by_groups = [pattern.attend == "groups" for pattern in patterns]
        top_ks = tuple(pattern.top_k if reads else 0 for pattern, reads in zip(patterns, by_groups, strict=True))
        reach = (pattern.local_window for pattern, reads in zip(patterns, by_groups, strict=True) if reads)
        windows, nothing = Windows(classes.patterns, heads), nothing_read(len(heads), config.num_groups, like)
        general = name, config, config.version, like.device, (name, len(heads) * config.num_groups)
        own = classes, starts_as_scores(top_ks, like), min(reach, default=config.local_window)
        return cls(*general, classes.dense_length, windows, nothing, *own)

    def remember(self, router: FocusLayer, hidden_states: Tensor, layer: Any) -> tuple[Unrouted, HeadRouters] | None:
        """Where the tokens were taken in, and the routers of the heads."""
        routers = router.head_routers(self.adapter_name)
        last = unrouted_tokens(layer, hidden_states.shape[0], self.owner, routers, self.window)
        if last is None:
            return None
        last.append(hidden_states)
        return last, routers

    def route(self, router: FocusLayer, hidden_states: Tensor, layer: Any) -> OneTokenRouting | None:
        remembered = self.remember(router, hidden_states, layer)
        if remembered is None:
            return None
        (last, routers), (batch, most) = remembered, (hidden_states.shape[0], self.starts.shape[1])
        scores = query_scores(hidden_states, routers)
        best_first = scores.squeeze(1).topk(most, dim=-1).indices
        reads = self.nothing.expand(batch, -1, -1).scatter(-1, best_first, self.starts.expand(batch, -1, -1))
        spelled_out = partial(_spelled_out, layer, self.config, self.owner, self.classes, reads)
        token = TokenByNumbers(last.numbers, reads, self.windows)
        return OneTokenRouting(token, self.config.pattern, layer, self.classes, 1, spelled_out)


def _spelled_out(
    layer: Any, config: FocusConfig, owner: object, classes: HeadClasses | None, reads: Tensor | None
) -> Routing:
    """The same as memberships."""
    return Routing(
        config.pattern,
        layer.group_memberships,
        config.top_k,
        cache_layer=layer,
        owner=owner,
        classes=classes,
        reads=None if reads is None else (reads == 0).flatten(1)[:, None],
        groups_each=layer.groups_each,
    )
