"""A pool whose lists are in host memory: the device has the recent tokens, and those pages that were read last.

What the host holds is always whole: tokens that leave the window are written there, and into the pages on the device
that get them; so a page is dropped by forgetting it. Which pages a step reads, the host has to ask (`fetch`): once
for all rows of a layer, which is the price of a device that is smaller than the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .device_pages import DevicePages
from .page_pool import PagePool, take_pages


@dataclass(frozen=True)
class Fetched:
    """Pages of each row that are on the device: int64 ``(B, n)`` each.

    Args:
        pages: which of the pool's pages on the device.
        lengths: tokens in each, 0 for one that is not meant.
        lists: of which each is a part.
    """

    pages: Tensor
    lengths: Tensor
    lists: Tensor


class TieredPool(PagePool):
    """A pool in host memory; ``keys`` and ``values`` are the pages that the device has of it, the first one nobody's.

    Args:
        rows, page, list_codes, like: see `PagePool`.
        device_pages: for how many pages of each row the device has room.

    Attributes:
        host_keys, host_values: all pages, ``(B, H_kv, N, D)`` and ``(B, H_kv, N, D_v)``; pinned, if the device is a
            GPU.
        books: which of them the device has.
        waits: times that the host waited for an answer of the device, or would wait if it were a GPU.
    """

    def __init__(
        self, rows: int, page: int, list_codes: list[int], like: tuple[Tensor, Tensor], device_pages: int
    ) -> None:
        super().__init__(rows, page, list_codes, like, looks=True)
        self.host_keys, self.host_values = (self._on_host(x) for x in (self.keys, self.values))
        self.keys, self.values = (F.pad(x, (0, 0, 0, device_pages * page)) for x in (self.keys, self.values))
        self.books = DevicePages(rows, device_pages, pages=1)
        self.waits = 0
        self._contents: tuple[Tensor, Tensor] | None = None

    def _on_host(self, tensor: Tensor) -> Tensor:
        """A copy for good, from where a GPU copies without waiting."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.device.type == "cuda")
        return host.copy_(tensor)

    def _asked(self, tensor: Tensor) -> Tensor:
        """On the host, which waits for it."""
        self.waits += 1
        return tensor.cpu()

    # -- reading -------------------------------------------------------------------------------------------------

    def fetch(self, lists: Tensor) -> Iterator[Fetched]:
        """Have the pages of lists on the device, in as many rounds as its room makes necessary, at least one.

        A round's pages may be gone in the next one.

        Args:
            lists: bool ``(B, lists)``, which ones each row reads.
        """
        list_of, length_of = self._whose()
        lists = F.pad(self._asked(lists), (0, 1))  # there may be none yet
        asked = lists.gather(1, list_of) & (length_of > 0)
        for pages in self.books.rounds(asked):
            slots, missing = self.books.bring(pages)
            self._copy(pages, slots, missing)
            meant, at = pages >= 0, pages.clamp(min=0)
            facts = torch.stack(
                [
                    torch.where(meant, slots + 1, 0),
                    torch.where(meant, length_of.gather(1, at), 0),
                    list_of.gather(1, at),
                ]
            )
            yield Fetched(*facts.to(self.device))

    def _whose(self) -> tuple[Tensor, Tensor]:
        """Of each page the list that it is a part of, and the tokens in it: on the host, ``(B, pages)`` each."""
        if self._contents is None:
            tables, lengths = self._asked(self.tables), self._asked(self.lengths)
            page = torch.arange(tables.shape[2])
            filled = (lengths[..., None] - page * self.page).clamp(0, self.page)
            numbers = torch.arange(tables.shape[1])[:, None].expand_as(filled)
            at = torch.where(filled > 0, tables, 0).flatten(1)  # page 0 is nobody's
            empty = torch.zeros(at.shape[0], self.positions.shape[1] // self.page, dtype=torch.long)
            list_of, length_of = (empty.scatter(1, at, x.flatten(1)) for x in (numbers, filled))
            length_of[:, 0] = 0
            self._contents = list_of, length_of
        return self._contents

    def _copy(self, pages: Tensor, slots: Tensor, missing: Tensor) -> None:
        """One copy of keys and one of values, of the pages that are missing."""
        rows, places = missing.nonzero(as_tuple=True)
        if not len(rows):
            return
        heads = self.keys.shape[1]
        row_and_head = rows[:, None] * heads + torch.arange(heads)
        from_page, to_page = pages[rows, places][:, None], (slots[rows, places] + 1)[:, None]
        for device, host in ((self.keys, self.host_keys), (self.values, self.host_values)):
            source = row_and_head * (host.shape[2] // self.page) + from_page
            target = row_and_head * (device.shape[2] // self.page) + to_page
            staged = host.new_empty(source.numel(), self.page * host.shape[3], pin_memory=host.is_pinned())
            torch.index_select(host.view(-1, staged.shape[1]), 0, source.flatten(), out=staged)
            into = device.view(-1, staged.shape[1])
            into.index_copy_(0, target.flatten().to(self.device), staged.to(self.device, non_blocking=True))

    def read(self, slots: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """See `Slots`; from host memory, and for all rows only."""
        assert rows is None
        at = self._asked(slots)
        every = torch.arange(at.shape[0])[:, None]
        keys, values = (
            x.transpose(1, 2)[every, at].transpose(1, 2).to(self.device) for x in (self.host_keys, self.host_values)
        )
        return keys, values, self.codes.gather(1, slots)

    # -- writing -------------------------------------------------------------------------------------------------

    def write(self, slots: Tensor, keys: Tensor, values: Tensor, codes: Tensor, positions: Tensor) -> None:
        self.codes[self._rows, slots], self.positions[self._rows, slots] = codes, positions
        at = self._asked(slots)
        here = self.books.slots.gather(1, at // self.page)
        here = torch.where(here < 0, 0, (here + 1) * self.page + at % self.page)
        self._put(here.to(self.device), keys, values)
        every = torch.arange(at.shape[0])[:, None]
        for host, new in ((self.host_keys, keys), (self.host_values, values)):
            host.transpose(1, 2)[every, at] = self._asked(new).transpose(1, 2)
        self._contents = None

    def _pages_for(self, lengths: Tensor) -> tuple[int, int]:
        self.waits += 2
        return super()._pages_for(lengths)

    def take_back(self, first: Tensor) -> None:
        super().take_back(first)
        self._contents = None

    def add_lists(self, codes: list[int]) -> None:
        super().add_lists(codes)
        self._contents = None

    def _move_pages(self, source: Tensor) -> None:
        source = self._asked(source)
        self.books.renumber(source)
        self.host_keys, self.host_values = (
            self._on_host(take_pages(x, source, self.page)) for x in (self.host_keys, self.host_values)
        )

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        rows = self._asked(rows)
        self.books.select(rows)
        self.host_keys, self.host_values = (
            self._on_host(x.index_select(0, rows)) for x in (self.host_keys, self.host_values)
        )
        self._contents = None

    def host_bytes(self) -> int:
        """Memory that it takes on the host."""
        return self.host_keys.nbytes + self.host_values.nbytes
