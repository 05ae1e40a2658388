"""Slots for cached tokens: keys, values, positions and groups of so many tokens in each row of a batch."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from .mask import PADDING


class Slots:
    """Room for ``N`` tokens in each of ``B`` rows. Slot 0 is nobody's: what goes there is lost.

    Args:
        rows: ``B``.
        count: ``N``.
        like: keys ``(..., H_kv, n, D)`` and values ``(..., H_kv, n, D_v)`` of the kind to be stored; they are not.

    Attributes:
        keys, values: ``(B, H_kv, N, D)`` and ``(B, H_kv, N, D_v)``.
        positions: ``(B, N)``, of the token in each slot, ``PADDING`` for none.
        codes: ``(B, N)``, its groups.
    """

    _BY_ROW: ClassVar[tuple[str, ...]] = ("keys", "values", "positions", "codes")

    def __init__(self, rows: int, count: int, like: tuple[Tensor, Tensor]) -> None:
        self.device = like[0].device
        self.keys, self.values = (x.new_zeros(rows, x.shape[1], count, x.shape[3]) for x in like)
        self.positions, self.codes = self._numbers(rows, count, fill=PADDING), self._numbers(rows, count)
        self._rows = torch.arange(rows, device=self.device)[:, None]

    def _numbers(self, *shape: int, fill: int = 0) -> Tensor:
        return torch.full(shape, fill, dtype=torch.long, device=self.device)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor, codes: Tensor, positions: Tensor) -> None:
        """Put tokens, keys ``(B, H_kv, n, D)`` and so on, into slots ``(B, n)``."""
        self._put(slots, keys, values)
        self.codes[self._rows, slots], self.positions[self._rows, slots] = codes, positions

    def _put(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        self.keys.transpose(1, 2)[self._rows, slots] = keys.transpose(1, 2)
        self.values.transpose(1, 2)[self._rows, slots] = values.transpose(1, 2)

    def read(self, slots: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and codes at slots ``(R, n)`` of these rows ``(R, 1)``, or of all."""
        rows = self._rows if rows is None else rows
        keys, values = (x.transpose(1, 2)[rows, slots].transpose(1, 2) for x in (self.keys, self.values))
        return keys, values, self.codes[rows, slots]

    def select(self, rows: Tensor) -> None:
        """Go on with these rows, in this order, some of them perhaps several times."""
        for name in self._BY_ROW:
            setattr(self, name, getattr(self, name).index_select(0, rows))
        self._rows = torch.arange(rows.shape[0], device=self.device)[:, None]

    def num_bytes(self) -> int:
        """Memory that it takes."""
        return sum(getattr(self, name).nbytes for name in self._BY_ROW)
