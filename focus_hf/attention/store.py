"""Keys and values of a batch of cached sequences, stored by groups: one structure, in pages, on the device.

A new token enters the *recent* ones: sinks, which stay there, and a ring. Once it is out of every later query's
window it moves to the *list* of its set of groups, in the pages of a pool (`page_pool`). So each token is read in
one place: recent ones under a mask, a list as a whole or not at all. Whatever happens to the tokens of all rows is a
fixed number of tensor operations; sizes come from counts that the host has without looking.

A row is a sequence, or with routing per head a key/value head of one.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from .host_tier import TieredPool
from .mask import PADDING, Pattern
from .page_pool import PagePool

#: Tokens in a page.
PAGE = 64

#: Tokens that may gather in the ring behind the window before they are moved to their lists.
SLACK = 64

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
        pool: where the tokens are. Slot 0 is nobody's; `recent` slots are those of sinks and ring; pages follow.
        next_position: ``(B,)``, of the next token.
        columns: ``(B, S)``, the position of the token in each column of the cache, ``PADDING`` for padding.
    """

    _BY_ROW = ("columns", "next_position", "_settled")

    def __init__(
        self,
        pattern: Pattern,
        num_groups: int,
        groups_each: int | None,
        like: tuple[Tensor, Tensor],
        device_pages: int | None = None,
    ) -> None:
        batch, self.device = like[0].shape[0], like[0].device
        self.pattern, self.num_groups, self.groups_each = pattern, num_groups, groups_each
        first = 1 + pattern.sink_tokens
        own_pages = -(-(first + pattern.local_window + SLACK) // PAGE)
        self.recent, self._ring = slice(1, own_pages * PAGE), own_pages * PAGE - first
        codes = [] if groups_each is None else codes_of_sets(num_groups, groups_each)
        if device_pages is None:
            self.pool = PagePool(own_pages, PAGE, codes, like)
        else:
            self.pool = TieredPool(own_pages, PAGE, codes, like, device_pages)
        self.next_position, self._settled = self._numbers(batch), self._numbers(batch, fill=pattern.sink_tokens)
        self.columns = self._numbers(batch, 0)
        self._bits = 1 << torch.arange(num_groups, device=self.device)
        self._describe_slots()
        #: Bounds that hold for every row: tokens of the ring that are in no list; the last tokens that the ring still
        #: has, in lists or not.
        self._waiting, self._intact = 0, self._ring
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
        slot = torch.arange(self.pool.positions.shape[1], device=self.device)
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
        placed = self.pool.positions[:, None, slots]
        distance = positions[..., None] - placed
        visible = distance <= self._reach[slots]
        visible |= (self.pool.codes[:, None, slots] & codes[..., None]) != 0
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
        reads = self.pool.shares(codes)
        if self.pattern.dense_below:
            reads |= (positions < self.pattern.dense_below)[..., None]
        return reads.logical_and_((positions != PADDING)[..., None])

    def in_order(self, row: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A row's recent tokens: keys ``(H_kv, n, D)``, values, codes ``(n,)``, positions ``(n,)``. The host looks."""
        sinks, next_ = self.pattern.sink_tokens, int(self.next_position[row])
        last = torch.arange(int(self._settled[row]), max(next_, sinks), device=self.device)
        positions = torch.cat([torch.arange(min(sinks, next_), device=self.device), last])
        slots = self._slots(positions)
        pool = self.pool
        return pool.keys[row, :, slots], pool.values[row, :, slots], pool.codes[row, slots], positions

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
        self.pool.write(self._slots(new), keys, values, codes, new)

    def _slots(self, positions: Tensor) -> Tensor:
        """Where recent tokens are; nobody's slot for padding."""
        sinks = self.pattern.sink_tokens
        return torch.where(positions < sinks, positions + 1, positions % self._ring + (sinks + 1))

    def _settle(self, limit: Tensor, most: int) -> None:
        """Move the ring's tokens before these positions ``(B,)``, at most so many, to their lists."""
        positions = self._settled[:, None] + torch.arange(most, device=self.device)
        keys, values, codes = self.pool.read(self._slots(positions))
        self._move(keys, values, codes, positions, positions < limit[:, None])
        self._settle_until(torch.maximum(self._settled, limit))
        self._waiting = self.pattern.local_window

    def _settle_until(self, positions: Tensor) -> None:
        self._settled, self._first = positions, None

    def _move(self, keys: Tensor, values: Tensor, codes: Tensor, positions: Tensor, keep: Tensor) -> None:
        """Append those tokens ``(B, n)`` to their lists that are to be kept."""
        if self.groups_each is None:
            self.pool.add_lists(codes[keep].unique().tolist())
        self.pool.append(keys, values, codes, positions, keep)
        if self.pool.positions.shape[1] != self._reach.shape[0]:
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
        self.pool.take_back(self._settled)

    def _refill(self) -> None:
        """Put the last tokens back into the ring, from wherever they are."""
        positions = self.next_position[:, None] - 1 - torch.arange(self._ring, device=self.device)
        positions = torch.where(positions >= self.pattern.sink_tokens, positions, PADDING)
        found = self.pool.read(self._find(positions))
        self.pool.write(self._slots(positions), *found, positions)
        self._intact = self._ring

    def _find(self, positions: Tensor) -> Tensor:
        """The slots of tokens by their positions ``(B, n)``; nobody's slot for padding."""
        placed = self.pool.positions
        here = (placed >= self._first_here()) & (placed < self.next_position[:, None])
        at = torch.where(here, placed + 1, 0)
        slot = torch.arange(at.shape[1], device=self.device).expand_as(at)
        slots = self._numbers(at.shape[0], max(self.columns.shape[1], 1) + 1).scatter_(1, at, slot)
        slots[:, 0] = 0
        return slots.gather(1, positions + 1)

    def select(self, rows: Tensor) -> None:
        """Go on with these rows, in this order, some of them perhaps several times."""
        rows = rows.to(self.device)
        for name in self._BY_ROW:
            setattr(self, name, getattr(self, name).index_select(0, rows))
        self.pool.select(rows)
        self._first = None

    def restore(self) -> tuple[Tensor, Tensor, Tensor]:
        """Every token in its column: keys ``(B, H_kv, S, D)``, values ``(B, H_kv, S, D_v)``, memberships bool
        ``(B, S, K)``.

        Padding has zeros; its memberships are as for any unknown token: all groups.
        """
        padding = self.columns == PADDING
        keys, values, codes = self.pool.read(self._find(self.columns))
        memberships = unpack_groups(codes, self.num_groups) | padding[..., None]
        keys, values = (x.masked_fill(padding[:, None, :, None], 0) for x in (keys, values))
        return keys, values, memberships

    def num_bytes(self) -> int:
        """Memory that it takes."""
        return self.pool.num_bytes() + sum(getattr(self, name).nbytes for name in self._BY_ROW)
