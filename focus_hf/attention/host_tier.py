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
        pages: which of the device's.
        lengths: tokens in each, 0 for one that is not meant.
        lists: of which each is a part.
    """

    pages: Tensor
    lengths: Tensor
    lists: Tensor


class TieredPool(PagePool):
    """A pool with its pages of lists on the host; ``keys`` and ``values`` are what the device has.

    Args:
        rows, page, list_codes, like: see `PagePool`.
        device_pages: how many pages of lists the device has room for, in each row.

    Attributes:
        host_keys, host_values: pages of lists, ``(B, H_kv, n, D)`` and ``(B, H_kv, n, D_v)``; pinned, if the device
            is a GPU.
        books: which of them the device has.
        waits: times that the host waited for an answer of the device, or would wait if it were a GPU.
    """

    def __init__(
        self, rows: int, page: int, list_codes: list[int], like: tuple[Tensor, Tensor], device_pages: int
    ) -> None:
        super().__init__(rows, page, list_codes, like)
        self.keys, self.values = (F.pad(x, (0, 0, 0, device_pages * page)) for x in (self.keys, self.values))
        self.host_keys, self.host_values = (self._on_host(x[:, :, :0]) for x in (self.keys, self.values))
        self.books = DevicePages(rows, device_pages, 1)
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
        from_page = (pages[rows, places] - 1)[:, None]
        to_page = (slots[rows, places] + 1)[:, None]
        for device, host in ((self.keys, self.host_keys), (self.values, self.host_values)):
            source = row_and_head * (host.shape[2] // self.page) + from_page
            target = row_and_head * (device.shape[2] // self.page) + to_page
            staged = host.new_empty(source.numel(), self.page * host.shape[3], pin_memory=host.is_pinned())
            torch.index_select(host.view(-1, staged.shape[1]), 0, source.flatten(), out=staged)
            into = device.view(-1, staged.shape[1])
            into.index_copy_(0, target.flatten().to(self.device), staged.to(self.device, non_blocking=True))

    def whole(self) -> tuple[Tensor, Tensor]:
        keys, values = (
            torch.cat([device[:, :, : self.page], host.to(self.device)], dim=2)
            for device, host in ((self.keys, self.host_keys), (self.values, self.host_values))
        )
        return keys, values

    # -- writing -------------------------------------------------------------------------------------------------

    def _put_in_lists(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        at = self._asked(slots)
        here = self.books.slots.gather(1, at // self.page)
        here = torch.where(here < 0, 0, (here + 1) * self.page + at % self.page)
        self._put(here.to(self.device), keys, values)
        kept = at >= self.page
        rows, _ = kept.nonzero(as_tuple=True)
        at = at[kept] - self.page
        for host, new in ((self.host_keys, keys), (self.host_values, values)):
            host.transpose(1, 2)[rows, at] = self._asked(new).transpose(1, 2)[kept]
        self._contents = None

    def take_back(self, first: Tensor) -> None:
        super().take_back(first)
        self._contents = None

    def add_lists(self, codes: list[int]) -> None:
        super().add_lists(codes)
        self._contents = None

    def _move_pages(self, source: Tensor) -> None:
        source = self._asked(source)
        self.books.renumber(source)
        on_host = (source[:, 1:] - 1).clamp(min=0)
        for name in ("host_keys", "host_values"):
            host = getattr(self, name)
            if not host.shape[2]:  # the first pages
                host = host.new_zeros(*host.shape[:2], self.page, host.shape[3])
            setattr(self, name, self._on_host(take_pages(host, on_host, self.page)))

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
