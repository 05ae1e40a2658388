"""The KV cache carries group memberships: a token keeps the groups it had when it was cached."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache


def find_cache(values: tuple[Any, ...]) -> Cache | None:
    """The self-attention cache among a module's arguments (models name the argument differently)."""
    for value in values:
        if isinstance(value, EncoderDecoderCache):
            return value.self_attention_cache
        if isinstance(value, Cache):
            return value
    return None


def cache_layer(cache: Cache, layer_idx: int) -> Any:
    """The cache's layer, created if the cache grows lazily; it now remembers memberships."""
    while len(cache.layers) <= layer_idx and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    layer: Any = cache.layers[layer_idx]
    if not hasattr(layer, "group_memberships"):
        layer.__class__ = _with_memberships(layer.__class__)
    return layer


def tokens_seen(layer: Any) -> int:
    """Tokens that went through this cache layer so far, whether or not it still holds them all."""
    return int(layer.get_seq_length())


def append_memberships(layer: Any, new: Tensor, owner: object) -> Tensor:
    """Store the new tokens' memberships and return those of all tokens seen, new ones included.

    Tokens whose groups are unknown (cached while the adapter was off, or by another adapter) count as members of
    every group: attended by all, as in the base model.

    Args:
        layer: from `cache_layer`, before the new tokens' keys are added.
        new: ``(B, T, K)`` bool.
        owner: the adapter; memberships of another one mean nothing here.

    Returns:
        ``(B, tokens seen + T, K)`` bool.
    """
    batch, _, num_groups = new.shape
    seen = tokens_seen(layer)
    known = layer.group_memberships
    if known is None or layer.group_owner != owner or known.shape[0] != batch:
        known = new.new_zeros(batch, 0, num_groups)
    known = known.to(new.device)[:, :seen]  # the cache may have been cropped since
    unknown = new.new_ones(batch, seen - known.shape[1], num_groups)
    layer.group_memberships = torch.cat([known, unknown, new], dim=1)
    layer.group_owner = owner
    return layer.group_memberships


@functools.cache
def _with_memberships(layer_class: type) -> type:
    """A subclass of a cache layer's own class that holds memberships and lets them follow its tokens.

    Memberships are ``K`` booleans a token beside ``2 * H_kv * D`` numbers of keys and values, so they stay where
    they are when a cache is offloaded, and cover all tokens seen even where a sliding layer drops old keys.
    """

    class CacheLayerWithGroups(layer_class):
        _layer_type = None  # or transformers would take it for the default layer of that type
        group_memberships: Tensor | None = None
        group_owner: object = None

        def _update_memberships(self, change: Callable[[Tensor], Tensor]) -> None:
            if self.group_memberships is not None:
                self.group_memberships = change(self.group_memberships)

        def reset(self) -> None:
            super().reset()
            self.group_memberships = None

        def reorder_cache(self, beam_idx: Tensor) -> None:
            super().reorder_cache(beam_idx)
            self._update_memberships(lambda known: known.index_select(0, beam_idx.to(known.device)))

        def batch_repeat_interleave(self, repeats: int) -> None:
            super().batch_repeat_interleave(repeats)
            self._update_memberships(lambda known: known.repeat_interleave(repeats, dim=0))

        def batch_select_indices(self, indices: Tensor) -> None:
            super().batch_select_indices(indices)
            self._update_memberships(lambda known: known[indices.to(known.device)])

    CacheLayerWithGroups.__name__ = f"{layer_class.__name__}WithGroups"
    CacheLayerWithGroups.__qualname__ = CacheLayerWithGroups.__name__
    return CacheLayerWithGroups
