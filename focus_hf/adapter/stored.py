"""A cache layer stored by groups (`attention.store`): when it is, and what new tokens do with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from ..attention import (
    MAX_GROUPS,
    PADDING,
    GroupedStore,
    HeadClass,
    Pattern,
    Scores,
    attend_store,
    groups_per_head,
    head_rows,
    memberships_of_rows,
    takes,
)
from ..attention.kernels import Kernel
from .cache import tokens_seen

#: Cached tokens from which storage by groups pays, for each slab that a query reads (measured on CPU).
GROUPED_TOKENS_PER_SLAB = 2048

#: Likewise where each head attends in its own way; from here on heads with a window only let tokens go.
GROUPED_TOKENS_BY_HEAD = 8192

#: More sets of groups than this would leave the slabs too small.
MAX_SLABS = 64


def follows(
    layer: Any, pattern: Pattern, owner: object, batch: int, classes: Sequence[HeadClass] | None = None
) -> bool:
    """Whether a layer is stored by the groups of this adapter, so that new tokens can go on from there."""
    store: GroupedStore | None = layer.store
    if store is None or layer.group_owner != owner:
        return False
    alike = store.heads == (() if classes is None else head_rows(classes))
    return alike and store.columns.shape[0] == batch and store.pattern == pattern


def too_short_to_store(layer: Any) -> bool:
    """Whether a layer is shorter than any that `can_store_by_groups`: asked in every layer and at every token."""
    return layer.device_tokens is None and tokens_seen(layer) < min(
        2 * GROUPED_TOKENS_PER_SLAB, GROUPED_TOKENS_BY_HEAD
    )


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
    return tokens_seen(layer) >= pays_from(num_groups, top_k)


def pays_from(num_groups: int, top_k: int) -> int:
    """Cached tokens from which a layer whose heads attend alike is stored by groups."""
    read = math.comb(num_groups, top_k) - math.comb(num_groups - top_k, top_k)  # sets that share one with the query's
    return GROUPED_TOKENS_PER_SLAB * (1 + read)


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
