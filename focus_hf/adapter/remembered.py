"""What a cache layer remembers of its tokens' groups, and how new tokens go on from there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attention import Pattern, numbers_of
from .cache import tokens_seen
from .heads import HeadRouters
from .last_tokens import Routed, Unrouted


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
    earlier = known.to(new.device)
    if earlier.shape[1] > seen:  # the cache was cut by other means than its crop()
        earlier = earlier[:, :seen]
    if (unknown := seen - earlier.shape[1]) > 0:
        earlier = torch.cat([earlier, new.new_ones(batch, unknown, num_groups)], dim=1)
    like_earlier = not unknown and (not seen or layer.groups_each == groups_each)
    layer.groups_each = groups_each if like_earlier else None
    layer.group_memberships = layer.join("group_memberships", earlier, new, dim=1)
    layer.group_owner = owner
    return layer.group_memberships


def known_numbers(
    layer: Any, batch: int, owner: object, num_groups: int, groups_each: int, routings: int
) -> Tensor | None:
    """The groups of all tokens seen by their numbers, to go on from.

    Args:
        layer: from `cache_layer`, before the new tokens' keys are added.
        batch: ``B``.
        owner: the adapter.
        num_groups: ``K``.
        groups_each: ``k``.
        routings: ``P``.

    Returns:
        int64 ``(B, P * k, tokens seen)``; ``None`` where it is not known that they all have so many groups of this
        adapter.
    """
    seen, numbers = tokens_seen(layer), layer.group_numbers
    if layer.group_owner != owner or layer.groups_each != groups_each or not seen:
        return None
    if numbers is None:
        known = layer.group_memberships
        if known is None or known.shape != (batch, seen, routings * num_groups):
            return None
        return numbers_of(known, num_groups, groups_each)
    return numbers if (numbers.shape[0], numbers.shape[-1]) == (batch, seen) else None


def unrouted_tokens(layer: Any, batch: int, owner: object, routers: HeadRouters, window: int) -> Unrouted | None:
    """What takes in single tokens with routing per head; ``None`` where `known_numbers` is.

    Args:
        layer, batch, owner: as for `known_numbers`.
        routers: of the ``P`` heads; every token is in one group of each.
        window: the narrowest of those who read groups.
    """
    last = layer.last_tokens
    if isinstance(last, Unrouted) and last.takes(routers, window) and last.shape == (batch, tokens_seen(layer)):
        return last if layer.group_owner == owner else None
    routings, _, num_groups = routers.centroids.shape
    known = known_numbers(layer, batch, owner, num_groups, 1, routings)
    if known is None:
        return None
    layer.last_tokens = made = Unrouted(known, routers, window)
    return made


def routed_tokens(
    layer: Any, batch: int, owner: object, num_groups: int, top_k: int, pattern: Pattern
) -> Routed | None:
    """What takes in single tokens with a routing that all heads share; ``None`` where `known_numbers` is.

    Args:
        layer, batch, owner, num_groups: as for `known_numbers`.
        top_k: groups of every token.
        pattern: of all heads.
    """
    last = layer.last_tokens
    if isinstance(last, Routed) and last.takes(top_k, pattern) and last.shape == (batch, tokens_seen(layer)):
        return last if layer.group_owner == owner else None
    known = known_numbers(layer, batch, owner, num_groups, top_k, 1)
    if known is None:
        return None
    layer.last_tokens = made = Routed(known, num_groups, pattern)
    return made
