"""Which pages a device has of a pool that is larger than it: least recently used out. The host keeps the books."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

#: Of a page that is not on the device, of a slot that has no page, and where no page is meant.
NONE = -1


class DevicePages:
    """Books for ``B`` rows, each with as many slots for pages; all tensors are int64 or bool, on the CPU.

    Args:
        rows: ``B``.
        capacity: slots of each row.
        pages: of each row, ``P``.

    Attributes:
        slots: ``(B, P)``, where on the device each page is.
        hits, misses: pages that were asked for and were there, or were not.
    """

    def __init__(self, rows: int, capacity: int, pages: int) -> None:
        self.capacity, self.hits, self.misses = capacity, 0, 0
        # A column more than there are pages and slots: what goes there is lost.
        self._slots = torch.full((rows, pages + 1), NONE)
        self._pages = torch.full((rows, capacity + 1), NONE)
        self._used = torch.zeros(rows, capacity + 1, dtype=torch.long)
        self._now = 1

    @property
    def slots(self) -> Tensor:
        return self._slots[:, :-1]

    def rounds(self, asked: Tensor) -> Iterator[Tensor]:
        """Pages that are asked for, as many at a time as there are slots; those on the device first.

        Args:
            asked: bool ``(B, P)``.

        Yields:
            ``(B, n)`` pages, ``NONE`` for none; at least once.
        """
        order = torch.where(asked, (self.slots < 0).long(), 2).argsort(dim=1, stable=True)
        counts = asked.sum(dim=1, keepdim=True)
        pages = torch.where(torch.arange(asked.shape[1]) < counts, order, NONE)[:, : int(counts.max())]
        yield from pages.split(self.capacity, dim=1)

    def bring(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Give each of these pages ``(B, n)``, of `rounds`, a slot.

        Returns:
            Their slots, ``NONE`` for none; and which of them have to be copied there. Both ``(B, n)``.
        """
        asked = pages >= 0
        slots = torch.where(asked, self._slots.gather(1, pages.clamp(min=0)), NONE)
        missing = asked & (slots < 0)
        count = int(missing.sum())
        self.misses, self.hits = self.misses + count, self.hits + int(asked.sum()) - count
        now = self._now + torch.arange(pages.shape[1]).expand_as(pages)
        self._now += pages.shape[1]
        self._used.scatter_(1, torch.where(slots < 0, self.capacity, slots), now)
        if count:
            oldest = self._used[:, :-1].argsort(dim=1, stable=True)
            free = oldest.gather(1, (missing.cumsum(dim=1) - 1).clamp(min=0))
            slots = torch.where(missing, free, slots)
            into = torch.where(missing, slots, self.capacity)
            self._put(torch.where(missing, pages, NONE), into)
            self._used.scatter_(1, into, now)
        return slots, missing

    def _put(self, pages: Tensor, into: Tensor) -> None:
        nowhere = self._slots.shape[1] - 1
        gone = self._pages.gather(1, into)
        self._slots.scatter_(1, torch.where(gone < 0, nowhere, gone), NONE)
        self._slots.scatter_(1, torch.where(pages < 0, nowhere, pages), into)
        self._pages.scatter_(1, into, pages)

    def renumber(self, source: Tensor) -> None:
        """Go on with pages that were others before: page ``i`` was ``source[:, i]``, which has a slot or not."""
        slots = self._slots.gather(1, source)
        pages = torch.arange(source.shape[1]).expand_as(slots)
        self._pages = torch.full_like(self._pages, NONE)
        self._pages.scatter_(1, torch.where(slots < 0, self.capacity, slots), pages)
        self._pages[:, -1] = NONE
        self._slots = torch.cat([slots, slots.new_full((slots.shape[0], 1), NONE)], dim=1)

    def select(self, rows: Tensor) -> None:
        """Go on with these rows."""
        for name in ("_slots", "_pages", "_used"):
            setattr(self, name, getattr(self, name).index_select(0, rows))
