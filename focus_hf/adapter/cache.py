"""The KV cache carries group memberships: a token keeps the groups it had when it was cached.

A long cache layer is moreover stored *by groups* (`attention.store`), so that decoding reads only what a token
attends to. Whatever needs its keys in their order (another adapter, a beam search that the layer does not know how to
follow, the base model's own attention) finds them as ever: the layer then goes back to plain storage.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache

from ..attention import (
    MAX_GROUPS,
    PADDING,
    GroupedStore,
    HeadClass,
    Pattern,
    Scores,
    TokensGone,
    attend_store,
    columns_by_head,
    groups_per_head,
    head_rows,
    memberships_of_columns,
    memberships_of_rows,
    takes,
)
from ..attention.kernels import Kernel

#: Cached tokens from which storage by groups pays, for each slab that a query reads (measured on CPU).
GROUPED_TOKENS_PER_SLAB = 2048

#: Likewise where each head attends in its own way; from here on heads with a window only let tokens go.
GROUPED_TOKENS_BY_HEAD = 4096

#: More sets of groups than this would leave the slabs too small.
MAX_SLABS = 64


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
        layer.device_tokens = getattr(cache, "device_tokens", None)  # of a `FocusCache`
    return layer


def tokens_seen(layer: Any) -> int:
    """Tokens that went through this cache layer so far, whether or not it still holds them all."""
    return int(layer.get_seq_length())


def append_memberships(layer: Any, new: Tensor, owner: object, groups_each: int | None = None) -> Tensor:
    """Store the new tokens' memberships and return those of all tokens seen, new ones included.

    Tokens whose groups are unknown (cached while the adapter was off, or by another adapter) count as members of
    every group: attended by all, as in the base model.

    Args:
        layer: from `cache_layer`, before the new tokens' keys are added.
        new: ``(B, T, K)`` bool.
        owner: the adapter; memberships of another one mean nothing here.
        groups_each: every new token is in exactly this many groups, if that is known; the layer's ``groups_each`` then
            says whether it holds for all tokens seen.

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
    like_earlier = not unknown.shape[1] and (not seen or layer.groups_each == groups_each)
    layer.groups_each = groups_each if like_earlier else None
    layer.group_memberships = torch.cat([known, unknown, new], dim=1)
    layer.group_owner = owner
    return layer.group_memberships


def follows(
    layer: Any, pattern: Pattern, owner: object, batch: int, classes: Sequence[HeadClass] | None = None
) -> bool:
    """Whether a layer is stored by the groups of this adapter, so that new tokens can go on from there."""
    store: GroupedStore | None = layer.store
    if store is None or layer.group_owner != owner:
        return False
    alike = store.heads == (() if classes is None else head_rows(classes))
    return alike and store.columns.shape[0] == batch and store.pattern == pattern


def can_store_by_groups(
    layer: Any, num_groups: int, top_k: int, kernel: Kernel, classes: Sequence[HeadClass] | None = None
) -> bool:
    """Whether a layer that holds plain keys should be stored by groups from now on, to be read by this backend.

    Args:
        layer: from `cache_layer`.
        num_groups: ``K``, of each head where these differ.
        top_k: groups that a token belongs to.
        kernel: the backend.
        classes: of the layer's heads, where they do not all attend alike.
    """
    if layer.__class__.__mro__[1] is not DynamicLayer or layer.stays_plain or num_groups > MAX_GROUPS:
        return False
    if layer.keys.dtype != layer.values.dtype:  # autocast leaves rotated keys in float32
        return False
    slabs = math.comb(num_groups, top_k)
    if slabs > MAX_SLABS:
        return False
    if (room := _room_for_lists(layer, classes)) is not None:
        return tokens_seen(layer) > room
    if layer.keys.device.type != "cpu" and (kernel.paged is None or layer.groups_each is None):
        return False  # it would read everything, or the device would have to be asked which sets of groups there are
    if classes is not None:
        gains = any(not row.everything for row in head_rows(classes))
        return gains and tokens_seen(layer) >= GROUPED_TOKENS_BY_HEAD
    read = slabs - math.comb(num_groups - top_k, top_k)  # sets that share a group with the query's
    return tokens_seen(layer) >= GROUPED_TOKENS_PER_SLAB * (1 + read)


def _room_for_lists(layer: Any, classes: Sequence[HeadClass] | None) -> int | None:
    """For how many tokens the device has room if lists are in host memory; ``None`` if they are on the device.

    Heads that attend to everything would have to fetch it for every token.
    """
    if classes is not None and any(row.everything for row in head_rows(classes)):
        return None
    return None if layer.device_tokens is None else int(layer.device_tokens)


def store_by_groups(
    layer: Any,
    pattern: Pattern,
    positions: Tensor,
    unpadded: bool = False,
    classes: Sequence[HeadClass] | None = None,
    looks: bool = False,
) -> None:
    """Sort a plain layer's keys and values into groups, by the memberships it remembers.

    Args:
        layer: from `cache_layer`, all its tokens attended.
        pattern: window, sinks, dense start.
        positions: ``(B, tokens seen)``, ``PADDING`` for padding, which is not stored.
        unpadded: there is none.
        classes: of the layer's heads, where they do not all attend alike: each is then a row of its own.
        looks: see `GroupedStore`.
    """
    known, each, keys, values = layer.group_memberships, layer.groups_each, layer.keys, layer.values
    num_groups = known.shape[-1] if classes is None else groups_per_head(classes)
    heads = () if classes is None else head_rows(classes)
    if classes is not None:
        known = memberships_of_rows(known, classes)
        keys, values = (x.flatten(0, 1)[:, None] for x in (keys, values))
    store = GroupedStore(pattern, num_groups, each, (keys, values), _room_for_lists(layer, classes), heads, looks)
    store.append(keys, values, store.pack(known), positions, each)
    layer.start_store(store, unpadded, classes)


def attend_stored(
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    memberships: Tensor,
    scores: Scores,
    kernel: Kernel,
    *,
    reads: Tensor | None = None,
    groups_each: int | None = None,
    unpadded: bool = False,
) -> Tensor | None:
    """Attention of new tokens against a layer stored by groups, which takes them in.

    Args:
        layer: a layer that `follows` this adapter.
        query: ``(B, H, Q, D)``.
        key, value: ``(B, H_kv, Q, D)``, of the new tokens only.
        positions: ``(B, tokens seen + Q)``.
        memberships: ``(B, Q, K)`` bool; the columns of all classes, where heads do not all attend alike.
        scores: plain ones.
        kernel: the backend.
        reads: likewise, the groups that the new tokens read, where these are not their own.
        groups_each: each of the new tokens is in exactly this many groups, if that is known.
        unpadded: nothing is padding.

    Returns:
        ``(B, H, Q, D_v)``; ``None``, and the layer is back in plain storage, if the positions do not go on where the
        store ends (a mask that changed on the way), or if these are more tokens than the backend takes at once.
    """
    store: GroupedStore = layer.store
    if not takes(store, query.shape[2], kernel):
        layer.restore(for_good=False)
        return None
    if not (unpadded and layer.store_unpadded) and not _goes_on(store, positions, tokens_seen(layer)):
        layer.restore()
        return None
    if layer.store_classes is not None:
        memberships = memberships_of_rows(memberships, layer.store_classes)
        reads = None if reads is None else memberships_of_rows(reads, layer.store_classes)
    query, key, value = (x.to(layer.dtype) for x in (query, key, value))  # autocast may have begun since
    output = attend_store(store, query, key, value, positions, memberships, scores, kernel, groups_each, reads)
    layer.num_stored += query.shape[2]
    layer.store_unpadded = layer.store_unpadded and unpadded
    return output


def _goes_on(store: GroupedStore, positions: Tensor, seen: int) -> bool:
    """Whether new positions count on from those in the store. A GPU is not asked; it stops where they do not."""
    new = positions[:, seen:]
    next_position = store.next_position[:: max(len(store.heads), 1)]
    first = torch.where(new == PADDING, next_position[:, None], new).amin(dim=1)
    same = (first == next_position).all()
    if same.device.type == "cpu":
        return bool(same)
    torch._assert_async(same, "The attention mask of tokens that are cached must not change while decoding.")
    return True


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
        #: Every token is in exactly this many groups, if that is known without looking.
        groups_each: int | None = None
        #: Tokens of lists that the device has room for in each row, when the store is to be in host memory.
        device_tokens: int | None = None
        #: While the layer is stored by groups; its own tensors are then empty.
        store: GroupedStore | None = None
        num_stored = 0
        #: Nothing in the store is padding.
        store_unpadded = False
        #: Of the heads in the store, where they do not all attend alike, and how many columns their groups have.
        store_classes: Sequence[HeadClass] | None = None
        store_columns = 0
        #: Plain for one call: heads have let tokens go.
        must_store = False
        #: Something needed the keys in their order; sorting them anew each time would cost more than it saves.
        stays_plain = False
        #: The next `update` is that of a routed call, which reads the store itself.
        routed = False

        # -- storage by groups -----------------------------------------------------------------------------------

        def start_store(self, store: GroupedStore, unpadded: bool, classes: Sequence[HeadClass] | None = None) -> None:
            self.num_stored, self.store_unpadded = self.get_seq_length(), unpadded
            known = self.group_memberships
            self.store_classes, self.store_columns = classes, 0 if known is None else known.shape[-1]
            self.store, self.group_memberships = store, None
            self.must_store = False
            self.__dict__["keys"] = self.__dict__["values"] = None

        def restore(self, for_good: bool = True) -> None:
            """Back to plain storage, with every token in its column.

            Args:
                for_good: something else needs it. If not, it is stored by groups again after this call, and heads that
                    have let tokens go do not look at these.

            Raises:
                TokensGone: something else would find tokens missing.
            """
            store = self.store
            if store is None:
                return
            if for_good and store.tokens_gone:
                raise TokensGone(
                    "This cache keeps of some heads their window only, and what continues it needs more: another "
                    "adapter, budget or mode, the base model, or a mask that changed. Start from an empty cache, or "
                    'let it keep everything, from the start, with focus_hf.set_routing(model, path="masked").'
                )
            keys, values, memberships = store.restore()
            self.groups_each = store.groups_each
            if self.store_classes is not None:
                keys, values = (x[:, 0].unflatten(0, (-1, len(store.heads))) for x in (keys, values))
                memberships = memberships_of_columns(memberships, self.store_classes, self.store_columns)
                if len(columns_by_head(self.store_classes)) * store.num_groups < self.store_columns:
                    self.groups_each = None
            self.group_memberships, self.must_store = memberships, store.tokens_gone
            self.store, self.stays_plain = None, for_good
            self.__dict__["keys"], self.__dict__["values"] = keys, values

        @property
        def keys(self) -> Any:
            self.restore()
            return self.__dict__.get("keys")

        @keys.setter
        def keys(self, tensor: Any) -> None:
            self.restore()
            self.__dict__["keys"] = tensor

        @property
        def values(self) -> Any:
            self.restore()
            return self.__dict__.get("values")

        @values.setter
        def values(self, tensor: Any) -> None:
            self.restore()
            self.__dict__["values"] = tensor

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            routed, self.routed = self.routed, False
            if self.store is not None and routed:
                return key_states, value_states
            return super().update(key_states, value_states, *args, **kwargs)

        def get_seq_length(self) -> int:
            return super().get_seq_length() if self.store is None else self.num_stored

        def crop(self, tokens_to_remove: int) -> None:
            if self.store is None or tokens_to_remove >= 0:
                super().crop(tokens_to_remove)
                return
            self.num_stored += tokens_to_remove
            self.store.crop(-tokens_to_remove)

        # -- memberships -----------------------------------------------------------------------------------------

        def _update_memberships(self, change: Callable[[Tensor], Tensor]) -> None:
            if self.group_memberships is not None:
                self.group_memberships = change(self.group_memberships)

        def _rows(self) -> Tensor:
            assert self.store is not None
            return torch.arange(self.store.columns.shape[0], device=self.store.device)

        def reset(self) -> None:
            self.store, self.stays_plain, self.must_store = None, False, False
            super().reset()
            self.group_memberships = None

        def reorder_cache(self, beam_idx: Tensor) -> None:
            if self.store is not None:
                self.store.select(beam_idx)
                return
            super().reorder_cache(beam_idx)
            self._update_memberships(lambda known: known.index_select(0, beam_idx.to(known.device)))

        def batch_repeat_interleave(self, repeats: int) -> None:
            if self.store is not None:
                self.store.select(self._rows().repeat_interleave(repeats))
                return
            super().batch_repeat_interleave(repeats)
            self._update_memberships(lambda known: known.repeat_interleave(repeats, dim=0))

        def batch_select_indices(self, indices: Tensor) -> None:
            if self.store is not None:
                rows = self._rows()
                self.store.select(rows[indices.to(rows.device)])
                return
            super().batch_select_indices(indices)
            self._update_memberships(lambda known: known[indices.to(known.device)])

    CacheLayerWithGroups.__name__ = f"{layer_class.__name__}WithGroups"
    CacheLayerWithGroups.__qualname__ = CacheLayerWithGroups.__name__
    return CacheLayerWithGroups
