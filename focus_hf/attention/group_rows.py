"""What one new token reads where all heads share a routing: a row for each group, made once for many tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .mask import Pattern


class GroupRows:
    """What queries of each group add to the scores of tokens, window aside.

    Args:
        numbers: int64 ``(B, k, S)``, groups of all tokens (`group_numbers.numbers_of`).
        num_groups: ``K``.
        pattern: of all heads. There is room for as many tokens after these as its window holds.
    """

    def __init__(self, numbers: Tensor, num_groups: int, pattern: Pattern) -> None:
        batch, _, length = numbers.shape
        self.shape = batch, num_groups
        self.longest, self._window = length + pattern.local_window + 1, pattern.local_window
        rows = torch.full((batch, num_groups, self.longest), float("-inf"), device=numbers.device)
        rows[..., :length].scatter_(1, numbers, 0.0)
        rows[..., : pattern.sink_tokens] = 0.0
        self._rows = rows.flatten(0, 1)
        self._first_rows = torch.arange(0, batch * num_groups, num_groups, device=numbers.device)[:, None]

    def added_to_scores(self, reads: Tensor, length: int) -> Tensor:
        """0 for tokens that the last one attends to, ``-inf`` for all others.

        Args:
            reads: int64 ``(B, k)``, the groups of the last one.
            length: tokens in all, at most `longest`.

        Returns:
            float32 ``(B, 1, length)``.
        """
        batch, each = reads.shape
        added = self._rows.index_select(0, (reads + self._first_rows).flatten())  # whole rows: their end is cut later
        if each > 1:
            added = added.view(batch, each, -1).amax(dim=1)
        near = min(self._window + 1, length)
        added.narrow(1, length - near, near).zero_()
        return added.narrow(1, 0, length).unsqueeze(1)


@dataclass(frozen=True)
class TokenByRows:
    """The groups of a call with one new token for each sequence, where all heads share a routing.

    Args:
        rows: of the tokens before; those that it does not know are in the window.
        reads: int64 ``(B, k)``, the groups of the new token.
        length: tokens in all.
    """

    rows: GroupRows
    reads: Tensor
    length: int

    @property
    def num_groups(self) -> int:
        """``K``."""
        return self.rows.shape[1]

    def added_to_scores(self) -> Tensor:
        """0 for tokens that the new one attends to, ``-inf`` for all others: float32 ``(B, 1, S)``."""
        return self.rows.added_to_scores(self.reads, self.length)
