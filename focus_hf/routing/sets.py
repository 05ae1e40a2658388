"""Sets of groups, numbered: with the paper's routing a token is in ``top_k`` of ``K`` groups, one of C(K, top_k) sets.

So a key has one number, however many groups it is in, and a query reads the sets that meet its own.
"""

from __future__ import annotations

import functools
import itertools
import math

import torch
from torch import Tensor


def set_numbers(memberships: Tensor, top_k: int) -> Tensor:
    """The number of each token's set.

    Args:
        memberships: bool ``(..., K)``, exactly ``top_k`` of them.
        top_k: groups of a token.

    Returns:
        int64 ``(...)``, below C(K, top_k); with one group each, that group.
    """
    if top_k == 1:
        return memberships.int().argmax(dim=-1)
    # The rank of a set in the combinatorial number system: the sum of C(c_i, i) over its members c_1 < c_2 < ...
    ranks = _ranks(memberships.shape[-1], top_k).to(memberships.device)
    place = memberships.long().cumsum(dim=-1)
    group = torch.arange(memberships.shape[-1], device=memberships.device)
    return (ranks[group, place.clamp(max=top_k)] * memberships).sum(dim=-1)


def members(num_groups: int, top_k: int, device: torch.device) -> Tensor:
    """The groups of each set, by its number: bool ``(sets, K)``."""
    return _members(num_groups, top_k).to(device)


def meeting(num_groups: int, top_k: int, device: torch.device) -> Tensor:
    """Which sets have a group in common: bool ``(sets, sets)``."""
    return _meeting(num_groups, top_k).to(device)


def ranks(num_groups: int, top_k: int, device: torch.device) -> Tensor:
    """A set's number is the sum over its groups, in ascending order, of what is here: int64 ``(K, top_k)``."""
    return _ranks(num_groups, top_k)[:, 1:].to(device)


@functools.cache
def _ranks(num_groups: int, top_k: int) -> Tensor:
    table = [[math.comb(group, place) if place else 0 for place in range(top_k + 1)] for group in range(num_groups)]
    with torch.inference_mode(False):
        return torch.tensor(table)


@functools.cache
def _members(num_groups: int, top_k: int) -> Tensor:
    with torch.inference_mode(False):
        chosen = torch.tensor(list(itertools.combinations(range(num_groups), top_k)))
        found = torch.zeros(len(chosen), num_groups, dtype=torch.bool).scatter_(1, chosen, True)
        return found[set_numbers(found, top_k).argsort()]


@functools.cache
def _meeting(num_groups: int, top_k: int) -> Tensor:
    with torch.inference_mode(False):
        sets = _members(num_groups, top_k).float()
        return (sets @ sets.T) > 0
