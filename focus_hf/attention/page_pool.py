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
from .slots import Slots

#: A list that needs pages gets one more for every so many that it has, so that they are neighbours.
RESERVE = 32

#: A pool that is full grows by one part in so many; it is then copied, as a plain cache is for every token.
GROWTH = 32


class PagePool(Slots):
    """Slots of ``B`` rows, in pages that belong to lists; the first page is nobody's.

    Args:
        rows: ``B``.
        page: tokens in a page.
        list_codes: codes of the lists, ascending.
        like: keys ``(..., H_kv, n, D)`` and values ``(..., H_kv, n, D_v)`` of the kind to be stored; they are not.
        looks: the host may look at how long lists are, so that the pool is hardly larger than they are.

    Attributes:
        tables: ``(B, lists, pages)``, which page of the pool each page of a list is.
        lengths: ``(B, lists)``, tokens in each list.
    """

    _BY_ROW = (*Slots._BY_ROW, "tables", "lengths", "_held", "_used")

    def __init__(
        self, rows: int, page: int, list_codes: list[int], like: tuple[Tensor, Tensor], looks: bool = False
    ) -> None:
        super().__init__(rows, page, like)
        self.page, self.list_codes, self._looks = page, list_codes, looks
        self.tables, self.lengths = (self._numbers(rows, len(list_codes), *n) for n in ((0,), ()))
        self._held, self._used = torch.zeros_like(self.lengths), self._numbers(rows, fill=1)
        self._list_codes = torch.tensor(list_codes, dtype=torch.long, device=self.device)
        #: A bound on the tokens in any row's lists.
        self._moved = 0
        self._runs: dict[int, list[tuple[int, list[slice]]]] = {}

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
        count, lists = keep.shape[1], len(self.list_codes)
        own = torch.where(keep, torch.searchsorted(self._list_codes, codes), lists)
        own, order = own.sort(dim=1, stable=True)
        every = torch.arange(lists + 1, device=self.device).repeat(keep.shape[0], 1)
        first = torch.searchsorted(own, every)
        earlier, lengths = F.pad(self.lengths, (0, 1)) - first, self.lengths + first.diff(dim=1)
        self._make_room(lengths, count)
        self.lengths = lengths
        self._hand_out_pages()
        pages, place = self.tables.shape[2], torch.arange(count, device=self.device) + earlier.gather(1, own)
        kept = own < lists
        entry = torch.where(kept, own * pages + place // self.page, 0)
        slots = torch.where(kept, self.tables.flatten(1).gather(1, entry) * self.page + place % self.page, 0)
        slots = torch.empty_like(slots).scatter_(1, order, slots)
        self.write(slots, keys, values, codes, torch.where(keep, positions, PADDING))
        self._runs = {}

    def take_back(self, first: Tensor) -> None:
        """Forget the tokens of lists from these positions ``(B,)`` on: they are at the ends."""
        gone = self.positions >= first[:, None]
        if self.list_codes:
            own = torch.searchsorted(self._list_codes, self.codes).clamp(max=len(self.list_codes) - 1)
            self.lengths = self.lengths.scatter_add(1, own, -gone.long())
        self.positions.masked_fill_(gone, PADDING)
        self._runs = {}

    # -- pages ---------------------------------------------------------------------------------------------------

    def _held_for(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Pages that lists of so many tokens need, and what they get when they need more."""
        need = (lengths + (self.page - 1)) // self.page
        return need, need + need // RESERVE

    def _hand_out_pages(self) -> None:
        """Give lists that have outgrown their pages new ones from the end of the pool."""
        need, enough = self._held_for(self.lengths)
        held = torch.where(need > self._held, enough, self._held)
        more = held - self._held
        start = self._used[:, None] + more.cumsum(dim=1) - more - self._held
        page = torch.arange(self.tables.shape[2], device=self.device)
        is_new = (page >= self._held[..., None]) & (page < held[..., None])
        self.tables = torch.where(is_new, start[..., None] + page, self.tables)
        self._held, self._used = held, self._used + more.sum(dim=1)

    def _make_room(self, lengths: Tensor, count: int) -> None:
        """Make sure that lists of these lengths, by so many tokens longer than they are, find pages."""
        self._moved += count
        pages, longest = self._pages_for(lengths)
        if 1 + pages > self.positions.shape[1] // self.page or longest > self.tables.shape[2]:
            self._repack(*(number + -(-number // GROWTH) for number in (pages, longest)))

    def _pages_for(self, lengths: Tensor) -> tuple[int, int]:
        """At least as many pages as lists of these lengths hold in any row, and as any of them holds."""
        if self._looks:
            held = torch.maximum(self._held_for(lengths)[1], self._held)
            return max(int(held.sum(dim=1).max()), 1), max(int(held.max()), 1)
        pages = (self._moved // self.page + 1 + len(self.list_codes)) * (RESERVE + 1) // RESERVE + 1
        return pages, pages

    def _repack(self, pages: int, longest: int) -> None:
        """Move to a pool of so many pages for lists, in which each list is in one piece."""
        need, held = self._held_for(self.lengths)
        start = 1 + held.cumsum(dim=1) - held
        page = torch.arange(longest, device=self.device)
        tables = torch.where(page < held[..., None], start[..., None] + page, 0)
        old = F.pad(self.tables, (0, longest - self.tables.shape[2]))
        total = 1 + pages
        target = torch.where(page < need[..., None], tables, total).flatten(1)
        source = self._numbers(held.shape[0], total + 1).scatter_(1, target, old.flatten(1))[:, :-1]
        self._move_pages(source)
        self.codes, self.positions = (
            take_pages(x[:, None, :, None], source, self.page)[:, 0, :, 0] for x in (self.codes, self.positions)
        )
        self.positions.masked_fill_((source == 0).repeat_interleave(self.page, dim=1), PADDING)
        self.tables, self._held, self._used = tables, held, 1 + held.sum(dim=1)

    def _move_pages(self, source: Tensor) -> None:
        """Go on with these pages ``(B, n)``."""
        self.keys, self.values = (take_pages(x, source, self.page) for x in (self.keys, self.values))

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self._runs = {}


def take_pages(pool: Tensor, source: Tensor, page: int) -> Tensor:
    """Another pool ``(B, H, n * page, D)`` of these pages ``(B, n)`` of each row."""
    batch, heads, slots, width = pool.shape
    first = torch.arange(0, batch * heads * (slots // page), slots // page, device=pool.device).view(batch, heads, 1)
    index = (first + source[:, None]).flatten()
    return pool.reshape(-1, page * width).index_select(0, index).view(batch, heads, -1, width)
