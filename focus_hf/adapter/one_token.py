"""The routing of one new token for each sequence, where nothing more is asked than where it may look.

What every layer does at every decoded token is told in as few operations as it takes: a token's groups are numbers,
and of earlier tokens nothing is moved.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from ..attention import HeadClasses, OneToken, starts_as_scores
from ..ranks import several
from .call import OneTokenRouting, Routing
from .config import FocusConfig
from .decide import dense_by_groups
from .layer import FocusLayer
from .remembered import append_numbers, known_numbers


@torch.no_grad()
def route_one_token(
    router: FocusLayer,
    adapter_name: str,
    hidden_states: Tensor,
    layer: Any,
    classes: HeadClasses | None,
    mask: Any,
) -> OneTokenRouting | None:
    """The routing of a call that is not dense, or ``None``, and nothing has happened, where it takes more.

    Args:
        router: of the attention module that is called.
        adapter_name: whose centroids.
        hidden_states: ``(B, T, d)``.
        layer: of the cache, if there is one.
        classes: of the layer's heads, where they do not all attend alike.
        mask: what the base model made, if anything.
    """
    config = router.configs[adapter_name]
    if hidden_states.shape[1] != 1 or mask is not None or layer is None or not _is_simple(router, layer):
        return None
    if classes is None:
        return _shared(router, adapter_name, hidden_states, layer, config)
    return _per_head(router, adapter_name, hidden_states, layer, config, classes)


def _is_simple(router: FocusLayer, layer: Any) -> bool:
    """Nobody looks on, nothing else was asked for, and the layer keeps all keys in their order."""
    observed = router.observer or router.attention_observer or router.pairs_observer or router.stand_in
    chosen = router.path != "auto" or router.kernel is not None
    if observed is not None or chosen or layer.store is not None or layer.must_store:
        return False
    if layer.__class__.__mro__[1] is not DynamicLayer or torch.compiler.is_compiling():
        return False
    return not router.shares_keys and not several()


def _shared(
    router: FocusLayer, adapter_name: str, hidden_states: Tensor, layer: Any, config: FocusConfig
) -> OneTokenRouting | None:
    if config.routing != "shared" or dense_by_groups(config, hidden_states, config.top_k):
        return None
    known = known_numbers(layer, hidden_states.shape[0], adapter_name, config.num_groups, config.top_k, 1)
    if known is None:
        return None
    scores, balance = router(hidden_states, adapter_name)
    own = (scores + balance).topk(config.top_k, dim=-1).indices
    numbers = append_numbers(layer, known, own.transpose(1, 2))
    reads = torch.full_like(scores, float("-inf")).scatter_(-1, own, 0.0)
    token = OneToken(numbers, reads, (config.pattern,))
    spelled_out = partial(_spelled_out, layer, config, adapter_name, None, None)
    return OneTokenRouting(token, config.pattern, layer, None, config.top_k, spelled_out)


def _per_head(
    router: FocusLayer,
    adapter_name: str,
    hidden_states: Tensor,
    layer: Any,
    config: FocusConfig,
    classes: HeadClasses,
) -> OneTokenRouting | None:
    top_ks = _groups_read(config, router.layer_idx)
    if config.routing != "per_head" or not top_ks:
        return None
    owner = (adapter_name, len(top_ks) * config.num_groups)
    known = known_numbers(layer, hidden_states.shape[0], owner, config.num_groups, 1, len(top_ks))
    if known is None:
        return None
    scores = router.head_scores(hidden_states, adapter_name)
    assert scores is not None  # there are heads with centroids
    numbers = append_numbers(layer, known, scores.keys.argmax(dim=-1).transpose(1, 2))
    queries = scores.queries[:, 0]
    best_first = queries.topk(max(top_ks), dim=-1).indices
    read = starts_as_scores(top_ks, like=queries).expand_as(best_first)
    reads = torch.full_like(queries, float("-inf")).scatter_(-1, best_first, read)
    token = OneToken(numbers, reads, classes.patterns, config.heads_with_groups(router.layer_idx))
    spelled_out = partial(_spelled_out, layer, config, owner, classes, reads)
    return OneTokenRouting(token, config.pattern, layer, classes, 1, spelled_out)


def _groups_read(config: FocusConfig, layer: int) -> tuple[int, ...]:
    """How many groups each head with centroids reads under the budget in force: none where a window is all it has."""

    def read() -> tuple[int, ...]:
        patterns = (config.head_pattern(layer, head) for head in config.heads_with_groups(layer))
        return tuple(how.top_k if how.attend == "groups" else 0 for how in patterns)

    made: tuple[int, ...] = config.once(("groups read", layer), read)
    return made


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
