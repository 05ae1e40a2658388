"""Memberships of tokens that are all in a known number of groups, as the numbers of these groups.

A token of one group of 64 is one number instead of 64 booleans, and whether a query reads its group is a look-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .constants import column, ends_as_scores, keeps, room_for
from .head_class import EVERYTHING
from .mask import Pattern


def numbers_of(memberships: Tensor, num_groups: int, each: int) -> Tensor:
    """Memberships as numbers.

    Args:
        memberships: bool ``(B, T, P * K)``, of one or several routings of ``K`` groups each.
        num_groups: ``K``.
        each: groups of every token in each routing, ``k``.

    Returns:
        int64 ``(B, P * k, T)``.
    """
    by_routing = memberships.unflatten(-1, (-1, num_groups)).to(torch.uint8)
    return by_routing.topk(each, dim=-1).indices.flatten(2).transpose(1, 2).contiguous()


def memberships_of(numbers: Tensor, num_groups: int, each: int) -> Tensor:
    """What `numbers_of` was made of."""
    by_routing = numbers.transpose(1, 2).unflatten(2, (-1, each))
    none = by_routing.new_zeros(*by_routing.shape[:3], num_groups, dtype=torch.bool)
    return none.scatter_(-1, by_routing, True).flatten(2)


class Windows:
    """What single new tokens attend to whatever their groups: sinks and windows of each key/value head.

    Args:
        patterns: of each key/value head.
        heads: ascending, of those that have a routing.
    """

    def __init__(self, patterns: Sequence[Pattern], heads: tuple[int, ...]) -> None:
        every = len(heads) == len(patterns)
        self._patterns, self._heads = tuple(patterns), None if every else heads
        self._kept: tuple[Tensor, Tensor | None] | None = None
        self._steady_from = max((p.dense_below for p in patterns if p.dense_below < EVERYTHING), default=0) + 1
        self._steady = self._reach(self._steady_from)

    def _reach(self, length: int) -> tuple[int, ...]:
        return tuple(EVERYTHING if length <= p.dense_below else p.local_window + 1 for p in self._patterns)

    def added_to(self, groups: Tensor) -> Tensor:
        """What is added to the scores of tokens: 0 for those that the new one attends to, ``-inf`` for all others.

        Args:
            groups: the same by groups alone, float32 ``(B, P, S)``.

        Returns:
            float32 ``(B, H_kv, S)``.
        """
        length, sinks = groups.shape[-1], self._patterns[0].sink_tokens
        all_heads, own = self._of(length, groups)
        if own is None:
            added = torch.maximum(groups, all_heads)
        else:
            assert self._heads is not None
            added = all_heads.expand(groups.shape[0], -1, -1).clone()
            added.index_copy_(1, column(self._heads, groups)[:, 0], torch.maximum(groups, own))
        if sinks:
            added.narrow(-1, 0, min(sinks, length)).zero_()
        return added

    def _of(self, length: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """Windows of all heads, ``(H_kv, S)``, and of those that have a routing, where these are not all."""
        if length < self._steady_from or not keeps(like):
            return self._made(self._reach(length), length, like)
        kept = self._kept
        if kept is None or kept[0].shape[-1] < length or kept[0].device != like.device:
            kept = self._kept = self._made(self._steady, room_for(length), like)
        all_heads, own = kept
        start = all_heads.shape[-1] - length
        return all_heads.narrow(-1, start, length), None if own is None else own.narrow(-1, start, length)

    def _made(self, reach: tuple[int, ...], length: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
        own = None if self._heads is None else tuple(reach[head] for head in self._heads)
        return ends_as_scores(reach, length, like), None if own is None else ends_as_scores(own, length, like)


@dataclass(frozen=True)
class TokenByNumbers:
    """The groups of a call with one new token for each sequence, where each token is in one group of each routing.

    Args:
        numbers: int64 ``(B, P, S)``, groups of all tokens (`numbers_of`).
        reads: float32 ``(B, P, K)``: 0 for groups that the new token reads, ``-inf`` for all others.
        windows: of the heads whose the ``P`` routings are, and of all others.
    """

    numbers: Tensor
    reads: Tensor
    windows: Windows

    @property
    def length(self) -> int:
        """Tokens in all."""
        return self.numbers.shape[-1]

    @property
    def num_groups(self) -> int:
        """``K``."""
        return self.reads.shape[-1]

    def added_to_scores(self) -> Tensor:
        """0 for tokens that the new one attends to, ``-inf`` for all others: float32 ``(B, H_kv, S)``."""
        return self.windows.added_to(self.reads.gather(-1, self.numbers))
