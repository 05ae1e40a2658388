"""Sets of groups, numbered: with the paper's routing a token is in ``top_k`` of ``K`` groups, one of C(K, top_k) sets.

So a key has one number, however many groups it is in, and a query reads the sets that meet its own. Where a token is
in more than half of the groups all sets meet, and count as one.
"""

from __future__ import annotations

import functools
import itertools
import math

import torch
from torch import Tensor


def count(num_groups: int, top_k: int) -> int:
    """How many sets there are."""
    return math.comb(num_groups, top_k) if 2 * top_k <= num_groups else 1


def set_numbers(groups: Tensor, num_groups: int) -> Tensor:
    """The number of each token's set, its rank in the combinatorial number system.

    Args:
        groups: that a token is in, integers ``(..., top_k)``, each once, in any order.
        num_groups: ``K``.

    Returns:
        Integers ``(...)``, below `count`; with one group each, that group.
    """
    if groups.shape[-1] == 1:
        return groups[..., 0]
    if count(num_groups, groups.shape[-1]) == 1:
        return torch.zeros_like(groups[..., 0])
    table, place = _ranks(num_groups, groups.shape[-1], groups.device)
    return table[groups.sort(dim=-1).values.int(), place].sum(dim=-1)


@functools.cache
def _ranks(num_groups: int, top_k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """C(c, i + 1) for each group c and place i, int64 ``(K, top_k)``, whose sum a set's number is; and the places."""
    table = [[math.comb(group, place + 1) for place in range(top_k)] for group in range(num_groups)]
    with torch.inference_mode(False):
        return torch.tensor(table, device=device), torch.arange(top_k, device=device)


@functools.cache
def members(num_groups: int, top_k: int, device: torch.device) -> Tensor:
    """The groups of each set, by its number: bool ``(sets, K)``; of the one that all count as, the first."""
    with torch.inference_mode(False):
        if count(num_groups, top_k) == 1:
            return torch.arange(num_groups, device=device)[None] == 0
        chosen = torch.tensor(list(itertools.combinations(range(num_groups), top_k)), device=device)
        found = torch.zeros(len(chosen), num_groups, dtype=torch.bool, device=device).scatter_(1, chosen, True)
        return found[set_numbers(chosen, num_groups).argsort()]


@functools.cache
def meeting(num_groups: int, top_k: int, device: torch.device) -> Tensor:
    """Which sets have a group in common: bool ``(sets, sets)``."""
    with torch.inference_mode(False):
        sets = members(num_groups, top_k, device).float()
        return (sets @ sets.T) > 0
