"""Rows of a store, some of which have lists beside their recent tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .head_class import HeadRow


class ListedRows:
    """The ``R`` rows of ``B`` sequences, ``R'`` of which have lists.

    Args:
        sequences: ``B``.
        heads: of each sequence, where every one is a row of its own: ``R = B * heads``. Those that forget what leaves
            their window have no lists. None of them: a row is a sequence with all its heads, and has lists.
        device: of the tensors.

    Attributes:
        places: ``(R,)``, which of the rows with lists each row is; -1 for one without.
        listed: ``(R',)``, the rows with lists; ``None`` for all of them.
    """

    def __init__(self, sequences: int, heads: Sequence[HeadRow], device: torch.device) -> None:
        self.heads, self.listed_heads = tuple(heads), [i for i, head in enumerate(heads) if not head.forgets]
        self._which = torch.tensor(self.listed_heads, dtype=torch.long, device=device)
        self._number(sequences)

    def _number(self, sequences: int) -> None:
        heads = len(self.heads)
        self.places = torch.arange(sequences * max(heads, 1), device=self._which.device)
        self.listed: Tensor | None = None
        if not self.all_listed:
            self.listed = self.places.view(sequences, heads).index_select(1, self._which).flatten()
            numbers = torch.arange(self.listed.shape[0], device=self.listed.device)
            self.places = torch.full_like(self.places, -1).index_copy_(0, self.listed, numbers)

    @property
    def all_listed(self) -> bool:
        """Every row has lists."""
        return len(self.listed_heads) == len(self.heads)

    @property
    def any_listed(self) -> bool:
        """Some row has lists."""
        return not self.heads or bool(self.listed_heads)

    @property
    def num_listed(self) -> int:
        """``R'``."""
        return self.places.shape[0] if self.listed is None else self.listed.shape[0]

    def by_row(self, of_sequences: Tensor) -> Tensor:
        """``(B, ...)`` to ``(R, ...)``."""
        return of_sequences.repeat_interleave(len(self.heads), dim=0) if self.heads else of_sequences

    def with_lists(self, of_rows: Tensor) -> Tensor:
        """Of ``(R, ...)`` those rows that have lists: ``(R', ...)``."""
        return of_rows if self.listed is None else of_rows.index_select(0, self.listed)

    def to_all(self, of_rows_with_lists: Tensor, none: int) -> Tensor:
        """``(R', ...)`` to ``(R, ...)``, with something for rows that have no lists."""
        if self.listed is None:
            return of_rows_with_lists
        every = of_rows_with_lists.new_full((self.places.shape[0], *of_rows_with_lists.shape[1:]), none)
        return every.index_copy_(0, self.listed, of_rows_with_lists)

    def place(self, row: int) -> int | None:
        """One of `places`, without looking at the device; ``None`` for a row without lists."""
        if not self.heads:
            return row
        sequence, head = divmod(row, len(self.heads))
        if head not in self.listed_heads:
            return None
        return sequence * len(self.listed_heads) + self.listed_heads.index(head)

    def select(self, sequences: Tensor) -> tuple[Tensor, Tensor]:
        """Go on with these sequences ``(B,)``: which rows these were, and which of those with lists."""
        rows, listed = (
            _rows_of(sequences, count) if self.heads else sequences
            for count in (len(self.heads), len(self.listed_heads))
        )
        self._number(sequences.shape[0])
        return rows, listed


def _rows_of(sequences: Tensor, heads: int) -> Tensor:
    """The rows of sequences that have one for each of so many heads."""
    return (sequences[:, None] * heads + torch.arange(heads, device=sequences.device)).flatten()
