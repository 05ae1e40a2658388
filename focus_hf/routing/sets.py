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
    num_groups, device = memberships.shape[-1], memberships.device
    place = memberships.long().cumsum(dim=-1).clamp(1, top_k) - 1
    group = torch.arange(num_groups, device=device)
    return (ranks(num_groups, top_k, device)[group, place] * memberships).sum(dim=-1)


@functools.cache
def ranks(num_groups: int, top_k: int, device: torch.device) -> Tensor:
    """A set's number is the sum over its groups, in ascending order, of what is here: int64 ``(K, top_k)``."""
    table = [[math.comb(group, place + 1) for place in range(top_k)] for group in range(num_groups)]
    with torch.inference_mode(False):
        return torch.tensor(table, device=device)


@functools.cache
def members(num_groups: int, top_k: int, device: torch.device) -> Tensor:
    """The groups of each set, by its number: bool ``(sets, K)``."""
    with torch.inference_mode(False):
        chosen = torch.tensor(list(itertools.combinations(range(num_groups), top_k)), device=device)
        found = torch.zeros(len(chosen), num_groups, dtype=torch.bool, device=device).scatter_(1, chosen, True)
        return found[set_numbers(found, top_k).argsort()]


@functools.cache
def meeting(num_groups: int, top_k: int, device: torch.device) -> Tensor:
    """Which sets have a group in common: bool ``(sets, sets)``."""
    with torch.inference_mode(False):
        sets = members(num_groups, top_k, device).float()
        return (sets @ sets.T) > 0
