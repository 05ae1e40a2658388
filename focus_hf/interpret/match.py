"""Which groups of two adapters are the same, and how groups go from layer to layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Match:
    """A group of one adapter and its counterpart in another.

    Args:
        group: of the first adapter.
        other: of the second.
        overlap: tokens in both over tokens in either (Jaccard), 0 to 1.
    """

    group: int
    other: int
    overlap: float


def match_groups(groups: np.ndarray, others: np.ndarray, num_groups: int, num_others: int) -> list[Match]:
    """Pair the groups of two layers so that as many tokens as possible are in paired groups (Hungarian method).

    Args:
        groups: int ``(n,)``, the first adapter's group of each token.
        others: int ``(n,)``, the second's, of the same tokens.
        num_groups, num_others: how many groups there are.

    Returns:
        One for each group of the smaller side, in the order of ``group``. A pair with a low overlap is no counterpart:
        the group is new.

    Raises:
        ValueError: the two are not of the same tokens.
    """
    from scipy.optimize import linear_sum_assignment

    if len(groups) != len(others):
        raise ValueError(f"Groups of {len(groups)} tokens cannot be matched with those of {len(others)}.")
    together = np.zeros((num_groups, num_others), dtype=np.int64)
    np.add.at(together, (groups, others), 1)
    rows, columns = linear_sum_assignment(together, maximize=True)
    either = together.sum(axis=1)[:, None] + together.sum(axis=0)[None] - together
    return [
        Match(int(row), int(column), float(together[row, column] / max(either[row, column], 1)))
        for row, column in zip(rows, columns, strict=True)
    ]
