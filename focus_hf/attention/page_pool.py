"""A pool of pages with lists of tokens in them, for each row of a batch: what is never read but whole.

A list is a set of groups; it fills pages of a fixed size, taken from the end of the pool. When the pool is full it is
packed into a larger one, in which each list is in one piece. Everything is the same number of tensor operations for
any number of rows; sizes come from bounds that the host has without looking.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .mask import PADDING

#: A list that needs pages gets one more for every so many that it has, so that they are neighbours.
RESERVE = 8

#: A pool that is full grows by one part in so many.
GROWTH = 8


class PagePool:
    """Slots for tokens of ``B`` rows: some to begin with, which whoever owns the pool gives out, then pages of lists.

    Args:
        own_pages: pages before those of lists. Slot 0 is nobody's: what goes there is lost.
        page: tokens in a page.
        list_codes: codes of the lists, ascending.
        like: keys ``(B, H_kv, n, D)`` and values ``(B, H_kv, n, D_v)`` of the kind to be stored; they are not.

    Attributes:
        keys, values: ``(B, H_kv, N, D)`` and ``(B, H_kv, N, D_v)``.
        positions: ``(B, N)``, of the token in each slot, ``PADDING`` for none.
        codes: ``(B, N)``, its groups.
        tables: ``(B, lists, pages)``, which page of the pool each page of a list is.
        lengths: ``(B, lists)``, tokens in each list.
    """

    _BY_ROW = ("keys", "values", "positions", "codes", "tables", "lengths", "_held", "_used")

    def __init__(self, own_pages: int, page: int, list_codes: list[int], like: tuple[Tensor, Tensor]) -> None:
        batch, self.device, slots = like[0].shape[0], like[0].device, own_pages * page
        self.own_pages, self.page, self.list_codes = own_pages, page, list_codes
        self.keys, self.values = (x.new_zeros(*x.shape[:2], slots, x.shape[3]) for x in like)
        self.positions, self.codes = self._numbers(batch, slots, fill=PADDING), self._numbers(batch, slots)
        self.tables, self.lengths = (self._numbers(batch, len(list_codes), *n) for n in ((0,), ()))
        self._held, self._used = torch.zeros_like(self.lengths), self._numbers(batch, fill=own_pages)
        self._list_codes = torch.tensor(list_codes, dtype=torch.long, device=self.device)
        self._rows = torch.arange(batch, device=self.device)[:, None]
        #: A bound on the tokens in any row's lists.
        self._moved = 0
        self._runs: dict[int, list[tuple[int, list[slice]]]] = {}

    def _numbers(self, *shape: int, fill: int = 0) -> Tensor:
        return torch.full(shape, fill, dtype=torch.long, device=self.device)

    # -- slots ---------------------------------------------------------------------------------------------------

    def write(self, slots: Tensor, keys: Tensor, values: Tensor, codes: Tensor, positions: Tensor) -> None:
        """Put tokens, keys ``(B, H_kv, n, D)`` and so on, into the owner's slots ``(B, n)``."""
        self._put(slots, keys, values)
        self.codes[self._rows, slots], self.positions[self._rows, slots] = codes, positions

    def _put(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        self.keys.transpose(1, 2)[self._rows, slots] = keys.transpose(1, 2)
        self.values.transpose(1, 2)[self._rows, slots] = values.transpose(1, 2)

    def _put_in_lists(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        self._put(slots, keys, values)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and codes at slots ``(B, n)``."""
        keys, values = (x.transpose(1, 2)[self._rows, slots].transpose(1, 2) for x in (self.keys, self.values))
        return keys, values, self.codes.gather(1, slots)

    # -- lists ---------------------------------------------------------------------------------------------------

    def shares(self, codes: Tensor) -> Tensor:
        """Which lists have a group of these codes ``(B, Q)``: bool ``(B, Q, lists)``."""
        return (self._list_codes & codes[..., None]) != 0

    def runs(self, row: int) -> list[tuple[int, list[slice]]]:
        """A row's lists that have tokens: their codes, and the stretches of slots that they fill. The host looks."""
        if row not in self._runs:
            lists = zip(self.list_codes, self.tables[row], self.lengths[row].tolist(), strict=True)
            self._runs[row] = [(code, self._stretches(pages, length)) for code, pages, length in lists if length]
        return self._runs[row]

    def _stretches(self, table: Tensor, length: int) -> list[slice]:
        """The slots of a list, neighbouring pages as one."""
        stretches: list[slice] = []
        for number, page in enumerate(table[: -(-length // self.page)].tolist()):
            start, stop = page * self.page, page * self.page + min(self.page, length - number * self.page)
            if number and stretches[-1].stop == start:
                start = stretches.pop().start
            stretches.append(slice(start, stop))
        return stretches

    def add_lists(self, codes: list[int]) -> None:
        """Have a list for each of these codes."""
        known = self.list_codes
        if set(codes) <= set(known):
            return
        self.list_codes = sorted({*known, *codes})
        places = [self.list_codes.index(code) for code in known]
        for name in ("tables", "lengths", "_held"):
            old = getattr(self, name)
            new = old.new_zeros(old.shape[0], len(self.list_codes), *old.shape[2:])
            new[:, places] = old
            setattr(self, name, new)
        self._list_codes = torch.tensor(self.list_codes, dtype=torch.long, device=self.device)

    def append(self, keys: Tensor, values: Tensor, codes: Tensor, positions: Tensor, keep: Tensor) -> None:
        """Append those tokens ``(B, n)`` to the lists of their codes that are to be kept, in their order."""
        if not self.list_codes:
            return
        count = keep.shape[1]
        self._reserve(count)
        lists, pages = len(self.list_codes), self.tables.shape[2]
        own = torch.where(keep, torch.searchsorted(self._list_codes, codes), lists)
        own, order = own.sort(dim=1, stable=True)
        every = torch.arange(lists + 1, device=self.device).repeat(keep.shape[0], 1)
        first = torch.searchsorted(own, every)
        earlier = F.pad(self.lengths, (0, 1)) - first
        self.lengths = self.lengths + first.diff(dim=1)
        self._hand_out_pages()
        place = torch.arange(count, device=self.device) + earlier.gather(1, own)
        kept = own < lists
        entry = torch.where(kept, own * pages + place // self.page, 0)
        slots = torch.where(kept, self.tables.flatten(1).gather(1, entry) * self.page + place % self.page, 0)
        slots = torch.empty_like(slots).scatter_(1, order, slots)
        self._put_in_lists(slots, keys, values)
        self.codes[self._rows, slots], self.positions[self._rows, slots] = codes, torch.where(keep, positions, PADDING)
        self._runs = {}

    def take_back(self, first: Tensor) -> None:
        """Forget the tokens of lists from these positions ``(B,)`` on: they are at the ends."""
        in_lists = slice(self.own_pages * self.page, None)
        positions, codes = self.positions[:, in_lists], self.codes[:, in_lists]
        gone = positions >= first[:, None]
        if self.list_codes:
            own = torch.searchsorted(self._list_codes, codes.contiguous()).clamp(max=len(self.list_codes) - 1)
            self.lengths = self.lengths.scatter_add(1, own, -gone.long())
        positions.masked_fill_(gone, PADDING)
        self._runs = {}

    # -- pages ---------------------------------------------------------------------------------------------------

    def _hand_out_pages(self) -> None:
        """Give lists that have outgrown their pages new ones from the end of the pool."""
        need = (self.lengths + (self.page - 1)) // self.page
        more = torch.where(need > self._held, need + need // RESERVE - self._held, 0)
        start = self._used[:, None] + more.cumsum(dim=1) - more - self._held
        page = torch.arange(self.tables.shape[2], device=self.device)
        held = self._held + more
        is_new = (page >= self._held[..., None]) & (page < held[..., None])
        self.tables = torch.where(is_new, start[..., None] + page, self.tables)
        self._held, self._used = held, self._used + more.sum(dim=1)

    def _reserve(self, count: int) -> None:
        """Make sure that so many more tokens in lists find room, whatever lists they are in."""
        self._moved += count
        if self._pages_for(self._moved) > self.tables.shape[2]:
            self._repack(self._pages_for(self._moved + self._moved // GROWTH))

    def _pages_for(self, tokens: int) -> int:
        """More pages than a row's lists can hold with so many tokens."""
        return (tokens // self.page + 1 + len(self.list_codes)) * (RESERVE + 1) // RESERVE + 1

    def _repack(self, pages: int) -> None:
        """Move to a pool of so many pages for lists, in which each list is in one piece."""
        need = (self.lengths + (self.page - 1)) // self.page
        held = need + need // RESERVE
        start = self.own_pages + held.cumsum(dim=1) - held
        page = torch.arange(pages, device=self.device)
        tables = torch.where(page < held[..., None], start[..., None] + page, 0)
        old = F.pad(self.tables, (0, pages - self.tables.shape[2]))
        total = self.own_pages + pages
        target = torch.where(page < need[..., None], tables, total).flatten(1)
        source = self._numbers(held.shape[0], total + 1).scatter_(1, target, old.flatten(1))[:, :-1]
        source[:, : self.own_pages] = torch.arange(self.own_pages, device=self.device)
        self._move_pages(source)
        self.codes, self.positions = (
            take_pages(x[:, None, :, None], source, self.page)[:, 0, :, 0] for x in (self.codes, self.positions)
        )
        free = source == 0
        free[:, 0] = False
        self.positions.masked_fill_(free.repeat_interleave(self.page, dim=1), PADDING)
        self.tables, self._held, self._used = tables, held, self.own_pages + held.sum(dim=1)

    def _move_pages(self, source: Tensor) -> None:
        """Go on with these pages ``(B, n)``."""
        self.keys, self.values = (take_pages(x, source, self.page) for x in (self.keys, self.values))

    # -- rows ----------------------------------------------------------------------------------------------------

    def select(self, rows: Tensor) -> None:
        """Go on with these rows, in this order, some of them perhaps several times."""
        for name in self._BY_ROW:
            setattr(self, name, getattr(self, name).index_select(0, rows))
        self._rows = torch.arange(rows.shape[0], device=self.device)[:, None]
        self._runs = {}

    def num_bytes(self) -> int:
        """Memory that it takes."""
        return sum(getattr(self, name).nbytes for name in self._BY_ROW)


def take_pages(pool: Tensor, source: Tensor, page: int) -> Tensor:
    """Another pool ``(B, H, n * page, D)`` of these pages ``(B, n)`` of each row."""
    batch, heads, slots, width = pool.shape
    first = torch.arange(0, batch * heads * (slots // page), slots // page, device=pool.device).view(batch, heads, 1)
    index = (first + source[:, None]).flatten()
    return pool.reshape(-1, page * width).index_select(0, index).view(batch, heads, -1, width)
