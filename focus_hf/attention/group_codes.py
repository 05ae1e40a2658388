"""Sets of groups as bits of an int64."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

#: Memberships are kept as bits of an int64.
MAX_GROUPS = 64


def unpack_groups(codes: Tensor, num_groups: int) -> Tensor:
    """Codes ``(...)`` to bool ``(..., K)``."""
    return (codes[..., None] >> torch.arange(num_groups, device=codes.device)) & 1 > 0


def codes_of_sets(num_groups: int, groups_each: int) -> list[int]:
    """The codes of all sets of so many groups, ascending."""
    sets = itertools.combinations(range(num_groups), groups_each)
    return sorted(_signed(sum(1 << group for group in some)) for some in sets)


def code_of_all(num_groups: int) -> int:
    """The code of a token that is in every group."""
    return _signed((1 << num_groups) - 1)


def _signed(bits: int) -> int:
    """64 bits as an int64."""
    return bits - (1 << 64) if bits >> 63 else bits
