"""Which groups of two adapters are the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import nn

from .agreement import count_table
from .collect import collect, first_windows
from .windows import text_windows

#: From this overlap on two groups are the same.
SAME = 0.5


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
    together = count_table(groups, others, (num_groups, num_others))
    rows, columns = linear_sum_assignment(together, maximize=True)
    either = together.sum(axis=1)[:, None] + together.sum(axis=0)[None] - together
    return [
        Match(int(row), int(column), float(together[row, column] / max(either[row, column], 1)))
        for row, column in zip(rows, columns, strict=True)
    ]


@dataclass(frozen=True)
class LayerMatch:
    """The groups of one layer of two adapters.

    Args:
        name: of the attention module.
        num_groups: of the first adapter.
        matches: see `match_groups`.
    """

    name: str
    num_groups: int
    matches: list[Match]

    @property
    def new(self) -> list[int]:
        """Groups of the first adapter without a counterpart in the second."""
        same = {match.group for match in self.matches if match.overlap >= SAME}
        return [group for group in range(self.num_groups) if group not in same]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "new": self.new}


def match_adapters(
    first: nn.Module, second: nn.Module, tokenizer: Any, texts: Sequence[str], window: int = 1024
) -> list[LayerMatch]:
    """Which groups of two adapters of one base model hold the same tokens, layer by layer.

    Where heads have groups of their own, the heads that both adapters have are compared.

    Args:
        first, second: the base model with either adapter.
        tokenizer: of the base model.
        texts: read by both; the first twenty thousand tokens are compared.
        window: tokens read at a time.

    Raises:
        ValueError: no text, or the adapters route different layers.
    """
    windows = first_windows(text_windows(tokenizer, texts, window))
    one, two = (
        {routed.name.removeprefix("base_model.model."): routed for routed in collect(model, windows)}
        for model in (first, second)
    )
    by_head = all(routed.head is not None for routed in (*one.values(), *two.values()))
    both = [name for name in one if name in two]
    if not both or (list(one) != list(two) and not by_head):
        raise ValueError(f"The adapters route different layers ({len(one)} and {len(two)}): compare by hand.")
    layers = [(name, one[name], two[name]) for name in both]
    return [
        LayerMatch(name, a.num_groups, match_groups(a.groups, b.groups, a.num_groups, b.num_groups))
        for name, a, b in layers
    ]
