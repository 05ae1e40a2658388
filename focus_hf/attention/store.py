"""Keys and values of a batch of cached sequences, stored by groups: one structure, in pages, on the device.

A new token enters the *recent* ones: sinks, which stay there, and a ring. Once it is out of every later query's
window it moves to the *list* of its set of groups, which is kept in pages of a fixed size. So each token is read in
one place: recent ones under a mask, a list as a whole or not at all. Whatever happens to the tokens of all rows is a
fixed number of tensor operations; sizes come from counts that the host has without looking.

A row is a sequence, or with routing per head a key/value head of one.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn import functional as F

from .mask import PADDING, Pattern

#: Tokens in a page.
PAGE = 64

#: Tokens that may gather in the ring behind the window before they are moved to their lists.
SLACK = 64

#: A list that needs pages gets one more for every so many that it has, so that they are neighbours.
RESERVE = 8

#: A pool that is full grows by one part in so many.
GROWTH = 8

#: Memberships are kept as bits of an int64.
MAX_GROUPS = 62


def unpack_groups(codes: Tensor, num_groups: int) -> Tensor:
    """Codes ``(...)`` to bool ``(..., K)``."""
    return (codes[..., None] >> torch.arange(num_groups, device=codes.device)) & 1 > 0


def codes_of_sets(num_groups: int, groups_each: int) -> list[int]:
    """The codes of all sets of so many groups."""
    return sorted(sum(1 << group for group in some) for some in itertools.combinations(range(num_groups), groups_each))


class GroupedStore:
    """Cached tokens of ``B`` rows.

    Args:
        pattern: window, sinks, dense start.
        num_groups: ``K``, at most `MAX_GROUPS`.
        groups_each: every token will be in exactly this many groups; ``None`` if that is not known, which makes the
            host look at them.
        like: keys ``(B, H_kv, n, D)`` and values ``(B, H_kv, n, D_v)`` of the kind to be stored; they are not.

    Attributes:
        keys, values: the pool, ``(B, H_kv, N, D)`` and ``(B, H_kv, N, D_v)``. Slot 0 is nobody's; `recent` slots are
            those of sinks and ring; pages follow.
        positions: ``(B, N)``, of the token in each slot, ``PADDING`` for none.
        codes: ``(B, N)``, its groups.
        tables: ``(B, lists, pages)``, which page of the pool each page of a list is.
        lengths: ``(B, lists)``, tokens in each list.
        next_position: ``(B,)``, of the next token.
        columns: ``(B, S)``, the position of the token in each column of the cache, ``PADDING`` for padding.
    """

    _BY_ROW = (
        *("keys", "values", "positions", "codes", "tables", "lengths", "columns", "next_position"),
        *("_held", "_used", "_settled"),
    )

    def __init__(
        self, pattern: Pattern, num_groups: int, groups_each: int | None, like: tuple[Tensor, Tensor]
    ) -> None:
        keys, values = like
        batch, self.device, self.page = keys.shape[0], keys.device, PAGE
        self.pattern, self.num_groups, self.groups_each = pattern, num_groups, groups_each
        self.list_codes = [] if groups_each is None else codes_of_sets(num_groups, groups_each)
        first = 1 + pattern.sink_tokens
        self._recent_pages = -(-(first + pattern.local_window + SLACK) // self.page)
        slots = self._recent_pages * self.page
        self.recent, self._ring = slice(1, slots), slots - first

        self.keys, self.values = (x.new_zeros(*x.shape[:2], slots, x.shape[3]) for x in like)
        self.positions, self.codes = self._numbers(batch, slots, fill=PADDING), self._numbers(batch, slots)
        self.tables, self.lengths = (self._numbers(batch, len(self.list_codes), *n) for n in ((0,), ()))
        self._held, self._used = torch.zeros_like(self.lengths), self._numbers(batch, fill=self._recent_pages)
        self.next_position, self._settled = self._numbers(batch), self._numbers(batch, fill=pattern.sink_tokens)
        self.columns = self._numbers(batch, 0)
        self._list_codes = torch.tensor(self.list_codes, dtype=torch.long, device=self.device)
        self._bits = 1 << torch.arange(num_groups, device=self.device)
        self._rows = torch.arange(batch, device=self.device)[:, None]
        self._describe_slots()
        #: Bounds that hold for every row: tokens of the ring that are in no list; the last tokens that the ring still
        #: has, in lists or not; tokens in lists.
        self._waiting, self._intact, self._moved = 0, self._ring, 0
        self._runs: dict[int, list[tuple[int, list[slice]]]] = {}
        self._first: Tensor | None = None

    @property
    def spare(self) -> int:
        """Tokens that the ring takes beside a window."""
        return self._ring - self.pattern.local_window

    def pack(self, memberships: Tensor) -> Tensor:
        """bool ``(..., K)`` to int64 codes ``(...)``, one bit per group."""
        return (memberships * self._bits).sum(dim=-1)

    def _numbers(self, *shape: int, fill: int = 0) -> Tensor:
        return torch.full(shape, fill, dtype=torch.long, device=self.device)

    def _describe_slots(self) -> None:
        """Facts of the slots that are the same in every row."""
        slot = torch.arange(self.positions.shape[1], device=self.device)
        sinks, recent = slot <= self.pattern.sink_tokens, slot < self.recent.stop
        self._in_ring = recent & ~sinks
        self._reach = torch.where(sinks, 1 << 62, torch.where(recent, self.pattern.local_window, -1))

    # -- reading -------------------------------------------------------------------------------------------------

    def visible(self, positions: Tensor, codes: Tensor, slots: slice) -> Tensor:
        """Which slots queries attend to: the definition, read in this structure.

        Args:
            positions: ``(B, Q)``, of the queries, which have been appended.
            codes: ``(B, Q)``, the groups that they read.
            slots: to look at.

        Returns:
            bool ``(B, Q, n)``.
        """
        placed = self.positions[:, None, slots]
        distance = positions[..., None] - placed
        visible = distance <= self._reach[slots]
        visible |= (self.codes[:, None, slots] & codes[..., None]) != 0
        if self.pattern.dense_below:
            visible |= positions[..., None] < self.pattern.dense_below
        return visible.logical_and_(distance >= 0).logical_and_(placed >= self._first_here()[:, None, slots])

    def _first_here(self) -> Tensor:
        """The first position that counts in each slot, ``(B, N)``: what the ring has of earlier ones is in lists."""
        if self._first is None:
            self._first = torch.where(self._in_ring, self._settled[:, None], 0)
        return self._first

    def reads(self, positions: Tensor, codes: Tensor) -> Tensor:
        """Which lists queries attend to, all tokens of them: bool ``(B, Q, lists)``. Arguments as for `visible`."""
        reads = (self._list_codes & codes[..., None]) != 0
        if self.pattern.dense_below:
            reads |= (positions < self.pattern.dense_below)[..., None]
        return reads.logical_and_((positions != PADDING)[..., None])

    def in_order(self, row: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A row's recent tokens: keys ``(H_kv, n, D)``, values, codes ``(n,)``, positions ``(n,)``. The host looks."""
        sinks, next_ = self.pattern.sink_tokens, int(self.next_position[row])
        last = torch.arange(int(self._settled[row]), max(next_, sinks), device=self.device)
        positions = torch.cat([torch.arange(min(sinks, next_), device=self.device), last])
        slots = self._slots(positions)
        return self.keys[row, :, slots], self.values[row, :, slots], self.codes[row, slots], positions

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

    # -- growing -------------------------------------------------------------------------------------------------

    def append(self, keys: Tensor, values: Tensor, codes: Tensor, columns: Tensor, groups_each: int | None) -> None:
        """Take in the tokens of new columns.

        Args:
            keys: ``(B, H_kv, n, D)``.
            values: ``(B, H_kv, n, D_v)``.
            codes: ``(B, n)``, from `pack`.
            columns: ``(B, S)``, positions of all columns, those that are there and the ``n`` new ones.
            groups_each: each of the new tokens is in exactly this many groups, if that is known.
        """
        count, window = keys.shape[2], self.pattern.local_window
        if groups_each != self.groups_each:
            self.groups_each = None
        new, before = columns[:, columns.shape[1] - count :], self.next_position
        last = new[:, 0] if count == 1 else new.amax(dim=1)
        self.columns, self.next_position = columns, torch.maximum(before, last + 1)
        if self._waiting + count > self._ring:
            if count <= self.spare:
                self._settle(before - window, self._waiting - window)
            else:
                limit = self.next_position - window
                self._settle(torch.minimum(limit, before), self._waiting)
                self._move(keys, values, codes, new, (new >= self.pattern.sink_tokens) & (new < limit[:, None]))
                self._settle_until(torch.maximum(self._settled, limit))
                fits = (new >= self.next_position[:, None] - self._ring) | (new < self.pattern.sink_tokens)
                new, count = torch.where(fits, new, PADDING), 0
        self._waiting += count
        self._write(self._slots(new), keys, values, codes, new)

    def _slots(self, positions: Tensor) -> Tensor:
        """Where recent tokens are; nobody's slot for padding."""
        sinks = self.pattern.sink_tokens
        return torch.where(positions < sinks, positions + 1, positions % self._ring + (sinks + 1))

    def _write(self, slots: Tensor, keys: Tensor, values: Tensor, codes: Tensor, positions: Tensor) -> None:
        self.keys.transpose(1, 2)[self._rows, slots] = keys.transpose(1, 2)
        self.values.transpose(1, 2)[self._rows, slots] = values.transpose(1, 2)
        self.codes[self._rows, slots], self.positions[self._rows, slots] = codes, positions

    def _read(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and codes at slots ``(B, n)``."""
        keys, values = (x.transpose(1, 2)[self._rows, slots].transpose(1, 2) for x in (self.keys, self.values))
        return keys, values, self.codes.gather(1, slots)

    def _settle(self, limit: Tensor, most: int) -> None:
        """Move the ring's tokens before these positions ``(B,)``, at most so many, to their lists."""
        positions = self._settled[:, None] + torch.arange(most, device=self.device)
        keys, values, codes = self._read(self._slots(positions))
        self._move(keys, values, codes, positions, positions < limit[:, None])
        self._settle_until(torch.maximum(self._settled, limit))
        self._waiting = self.pattern.local_window

    def _settle_until(self, positions: Tensor) -> None:
        self._settled, self._first = positions, None

    def _forget(self) -> None:
        """What was derived from lists and slots holds no more."""
        self._runs, self._first = {}, None

    def _move(self, keys: Tensor, values: Tensor, codes: Tensor, positions: Tensor, keep: Tensor) -> None:
        """Append those tokens ``(B, n)`` to their lists that are to be kept, in their order."""
        count = keep.shape[1]
        if self.groups_each is None:
            self._add_lists(codes[keep].unique().tolist())
        if not self.list_codes:
            return
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
        self._write(slots, keys, values, codes, torch.where(keep, positions, PADDING))
        self._forget()

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

    def _add_lists(self, codes: list[int]) -> None:
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

    # -- the pool ------------------------------------------------------------------------------------------------

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
        start = self._recent_pages + held.cumsum(dim=1) - held
        page = torch.arange(pages, device=self.device)
        tables = torch.where(page < held[..., None], start[..., None] + page, 0)
        old = F.pad(self.tables, (0, pages - self.tables.shape[2]))
        total = self._recent_pages + pages
        target = torch.where(page < need[..., None], tables, total).flatten(1)
        source = self._numbers(held.shape[0], total + 1).scatter_(1, target, old.flatten(1))[:, :-1]
        source[:, : self._recent_pages] = torch.arange(self._recent_pages, device=self.device)
        self.keys, self.values = (_take_pages(x, source, self.page) for x in (self.keys, self.values))
        self.codes, self.positions = (
            _take_pages(x[:, None, :, None], source, self.page)[:, 0, :, 0] for x in (self.codes, self.positions)
        )
        free = source == 0
        free[:, 0] = False
        self.positions.masked_fill_(free.repeat_interleave(self.page, dim=1), PADDING)
        self.tables, self._held, self._used = tables, held, self._recent_pages + held.sum(dim=1)
        self._describe_slots()

    # -- what happens to a cache ---------------------------------------------------------------------------------

    def crop(self, count: int) -> None:
        """Forget the last columns."""
        self.columns = self.columns[:, : self.columns.shape[1] - count]
        none = self._numbers(self.columns.shape[0], 1, fill=PADDING)
        self.next_position = torch.cat([none, self.columns], dim=1).amax(dim=1) + 1
        settled = torch.minimum(self._settled, self.next_position - self.pattern.local_window)
        self._settle_until(settled.clamp(min=self.pattern.sink_tokens))
        self._waiting, self._intact = max(self._waiting, self.pattern.local_window), self._intact - count
        if self._intact < self.pattern.local_window:
            self._refill()
        in_lists = slice(self.recent.stop, None)
        positions, codes = self.positions[:, in_lists], self.codes[:, in_lists]
        gone = positions >= self._settled[:, None]
        if self.list_codes:
            own = torch.searchsorted(self._list_codes, codes.contiguous()).clamp(max=len(self.list_codes) - 1)
            self.lengths = self.lengths.scatter_add(1, own, -gone.long())
        positions.masked_fill_(gone, PADDING)
        self._forget()

    def _refill(self) -> None:
        """Put the last tokens back into the ring, from wherever they are."""
        positions = self.next_position[:, None] - 1 - torch.arange(self._ring, device=self.device)
        positions = torch.where(positions >= self.pattern.sink_tokens, positions, PADDING)
        found = self._read(self._find(positions))
        self._write(self._slots(positions), *found, positions)
        self._intact = self._ring

    def _find(self, positions: Tensor) -> Tensor:
        """The slots of tokens by their positions ``(B, n)``; nobody's slot for padding."""
        here = (self.positions >= self._first_here()) & (self.positions < self.next_position[:, None])
        at = torch.where(here, self.positions + 1, 0)
        slot = torch.arange(at.shape[1], device=self.device).expand_as(at)
        slots = self._numbers(at.shape[0], max(self.columns.shape[1], 1) + 1).scatter_(1, at, slot)
        slots[:, 0] = 0
        return slots.gather(1, positions + 1)

    def select(self, rows: Tensor) -> None:
        """Go on with these rows, in this order, some of them perhaps several times."""
        rows = rows.to(self.device)
        for name in self._BY_ROW:
            setattr(self, name, getattr(self, name).index_select(0, rows))
        self._rows = torch.arange(rows.shape[0], device=self.device)[:, None]
        self._forget()

    def restore(self) -> tuple[Tensor, Tensor, Tensor]:
        """Every token in its column: keys ``(B, H_kv, S, D)``, values ``(B, H_kv, S, D_v)``, memberships bool
        ``(B, S, K)``.

        Padding has zeros; its memberships are as for any unknown token: all groups.
        """
        padding = self.columns == PADDING
        keys, values, codes = self._read(self._find(self.columns))
        memberships = unpack_groups(codes, self.num_groups) | padding[..., None]
        keys, values = (x.masked_fill(padding[:, None, :, None], 0) for x in (keys, values))
        return keys, values, memberships

    def num_bytes(self) -> int:
        """Memory that it takes."""
        return sum(getattr(self, name).nbytes for name in self._BY_ROW)


def _take_pages(pool: Tensor, source: Tensor, page: int) -> Tensor:
    """Another pool ``(B, H, n * page, D)`` of these pages ``(B, n)`` of each row."""
    batch, heads, slots, width = pool.shape
    first = torch.arange(0, batch * heads * (slots // page), slots // page, device=pool.device).view(batch, heads, 1)
    index = (first + source[:, None]).flatten()
    return pool.reshape(-1, page * width).index_select(0, index).view(batch, heads, -1, width)
