"""Keys and values of a batch of cached sequences, stored by groups: one structure, in pages, on the device.

A new token enters the *recent* ones: sinks, which stay there, and a ring. Once it is out of every later query's
window it moves to the *list* of its set of groups, in the pages of a pool (`page_pool`). So each token is read in
one place: recent ones under a mask, a list as a whole or not at all. Whatever happens to the tokens of all rows is a
fixed number of tensor operations; sizes come from counts that the host has without looking.

A row is a sequence with all its heads, or where each head has a way of its own to attend, one key/value head of one.
A head that needs nothing beyond its window has no lists: what leaves the ring is gone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .group_codes import code_of_all, codes_of_sets, unpack_groups
from .head_class import HeadRow
from .host_tier import TieredPool
from .listed_rows import ListedRows
from .mask import PADDING, Pattern
from .page_pool import PagePool
from .slots import Slots

#: Tokens in a page.
PAGE = 64

#: Tokens that may gather in the ring behind the window before they are moved to their lists.
SLACK = 64

#: With more lists than this, pages are an eighth as large: half of each list's last page is empty.
MANY_LISTS = 32


class TokensGone(ValueError):
    """Tokens are needed that heads with a window only have let go."""


class GroupedStore:
    """Cached tokens of ``B`` sequences, in ``R`` rows.

    Args:
        pattern: window, sinks, dense start.
        num_groups: ``K``, at most `group_codes.MAX_GROUPS`.
        groups_each: every token will be in exactly this many groups; ``None`` if that is not known, which makes the
            host look at them.
        like: keys ``(R, H_kv, n, D)`` and values ``(R, H_kv, n, D_v)`` of the kind to be stored; they are not.
        device_tokens: the lists are in host memory, and the device has room for so many of their tokens in each row,
            a page or more; ``None`` for lists on the device.
        heads: of a sequence, where each is a row of its own: ``R = B * heads``, and ``H_kv`` is 1. The pattern's
            window is then not looked at.
        looks: see `PagePool`.

    Attributes:
        recent: sinks and ring of all rows. Slot 0 is nobody's.
        pool: the lists of those rows that have any, in this order.
        rows: which of them have lists.
        next_position: ``(R,)``, of the next token.
        columns: ``(B, S)``, the position of the token in each column of the cache, ``PADDING`` for padding.
    """

    def __init__(
        self,
        pattern: Pattern,
        num_groups: int,
        groups_each: int | None,
        like: tuple[Tensor, Tensor],
        device_tokens: int | None = None,
        heads: Sequence[HeadRow] = (),
        looks: bool = False,
    ) -> None:
        rows, self.device = like[0].shape[0], like[0].device
        self.pattern, self.num_groups, self.groups_each, self.heads = pattern, num_groups, groups_each, tuple(heads)
        self.rows = ListedRows(rows // max(len(self.heads), 1), self.heads, self.device)
        first, self._window = 1 + pattern.sink_tokens, self._widest()
        slots = -(-(first + self._window + SLACK) // PAGE) * PAGE
        self.recent, self._ring = Slots(rows, slots, like), slots - first
        self.pool = self._new_pool(self.rows.num_listed, like, device_tokens, looks)
        self.next_position, self._settled = self._numbers(rows), self._numbers(rows, fill=pattern.sink_tokens)
        self.columns = self._numbers(rows // max(len(self.heads), 1), 0)
        self._bits = 1 << torch.arange(num_groups, device=self.device)
        windows = [head.local_window for head in self.heads] or [pattern.local_window]
        self._windows = torch.tensor(windows, device=self.device)[:, None, None]
        self._describe_slots()
        #: Bounds that hold for every row: tokens of the ring that are in no list; the last tokens that the ring still
        #: has, in lists or not. And whether heads may have let tokens go.
        self._waiting, self._intact, self.tokens_gone = 0, self._ring, False
        self._first: Tensor | None = None

    def _new_pool(self, rows: int, like: tuple[Tensor, Tensor], device_tokens: int | None, looks: bool) -> PagePool:
        codes = self._codes_of_lists()
        page = PAGE if len(codes) <= MANY_LISTS else -(-PAGE // 8)
        if device_tokens is None or not rows:
            return PagePool(rows, page, codes, like, looks)
        return TieredPool(rows, page, codes, like, device_tokens // page)

    def _widest(self) -> int:
        """How long a token may be needed without its groups."""
        width = max((head.local_window for head in self.heads), default=self.pattern.local_window)
        return max(width, self.pattern.dense_below) if any(head.forgets for head in self.heads) else width

    def _codes_of_lists(self) -> list[int]:
        if self.groups_each is None or not self.rows.any_listed:
            return []
        codes = set(codes_of_sets(self.num_groups, self.groups_each))
        if any(head.everything for head in self.heads):
            codes.add(code_of_all(self.num_groups))
        return sorted(codes)

    @property
    def spare(self) -> int:
        """Tokens that the ring takes beside a window."""
        return self._ring - self._window

    def pack(self, memberships: Tensor) -> Tensor:
        """bool ``(..., K)`` to int64 codes ``(...)``, one bit per group."""
        return (memberships * self._bits).sum(dim=-1)

    def _numbers(self, *shape: int, fill: int = 0) -> Tensor:
        return torch.full(shape, fill, dtype=torch.long, device=self.device)

    def _describe_slots(self) -> None:
        """Facts of recent slots that do not change with their tokens."""
        slot = torch.arange(self.recent.positions.shape[1], device=self.device)
        sinks = slot <= self.pattern.sink_tokens
        reach = torch.where(sinks, 1 << 62, self._windows)
        self._in_ring, self._reach = ~sinks, reach.repeat(self.columns.shape[0], 1, 1) if self.heads else reach

    # -- reading -------------------------------------------------------------------------------------------------

    def visible(self, positions: Tensor, codes: Tensor) -> Tensor:
        """Which recent slots, from 1 on, queries attend to: the definition, read in this structure.

        Args:
            positions: ``(R, Q)``, of the queries, which have been appended.
            codes: ``(R, Q)``, the groups that they read.

        Returns:
            bool ``(R, Q, n)``.
        """
        recent, reach, first = self.recent, self._reach[..., 1:], self._first_here()[:, 1:]
        return self._sees(positions, codes, recent.positions[:, 1:], recent.codes[:, 1:], reach, first)

    def _sees(
        self, positions: Tensor, codes: Tensor, placed: Tensor, of: Tensor, reach: Tensor, first: Tensor | int
    ) -> Tensor:
        distance = positions[..., None] - placed[:, None]
        visible = distance <= reach
        visible |= (of[:, None] & codes[..., None]) != 0
        if self.pattern.dense_below:
            visible |= positions[..., None] < self.pattern.dense_below
        return visible.logical_and_(distance >= 0).logical_and_((placed >= first)[:, None])

    def _first_here(self) -> Tensor:
        """The first position that counts in each recent slot: what the ring has of earlier ones is in lists."""
        if self._first is None:
            self._first = torch.where(self._in_ring, self._settled[:, None], 0)
        return self._first

    def reads(self, positions: Tensor, codes: Tensor) -> Tensor:
        """Which lists queries attend to, all tokens of them: bool ``(R', Q, lists)``, of rows that have lists.

        Arguments as for `visible`.
        """
        positions, codes = self.rows.with_lists(positions), self.rows.with_lists(codes)
        reads = self.pool.shares(codes)
        if self.pattern.dense_below:
            reads |= (positions < self.pattern.dense_below)[..., None]
        return reads.logical_and_((positions != PADDING)[..., None])

    def visible_everywhere(self, positions: Tensor, codes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All slots of each row, as keys ``(R, H_kv, N, D)`` and values, and which ones queries attend to. A copy."""
        recent, pool = self.recent, self.pool
        keys = torch.cat([recent.keys, self.rows.to_all(pool.keys, 0)], dim=2)
        values = torch.cat([recent.values, self.rows.to_all(pool.values, 0)], dim=2)
        codes_of = torch.cat([recent.codes, self.rows.to_all(pool.codes, 0)], dim=1)
        reach = F.pad(self._reach, (0, pool.positions.shape[1]), value=-1)
        return keys, values, self._sees(positions, codes, self._placed(), codes_of, reach, 0)

    def _placed(self) -> Tensor:
        """The positions of the tokens in all slots of each row, each token once: ``(R, N)``."""
        here = self.recent.positions.where(self.recent.positions >= self._first_here(), PADDING)
        return torch.cat([here, self.rows.to_all(self.pool.positions, PADDING)], dim=1)

    def in_order(self, row: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A row's recent tokens: keys ``(H_kv, n, D)``, values, codes ``(n,)``, positions ``(n,)``. The host looks."""
        sinks, next_ = self.pattern.sink_tokens, int(self.next_position[row])
        last = torch.arange(int(self._settled[row]), max(next_, sinks), device=self.device)
        positions = torch.cat([torch.arange(min(sinks, next_), device=self.device), last])
        slots, recent = self._slots(positions), self.recent
        return recent.keys[row, :, slots], recent.values[row, :, slots], recent.codes[row, slots], positions

    def runs(self, row: int) -> tuple[int, list[tuple[int, list[slice]]]]:
        """Where a row's lists are: its row in the pool, and `PagePool.runs`. The host looks."""
        place = self.rows.place(row)
        return (0, []) if place is None else (place, self.pool.runs(place))

    # -- growing -------------------------------------------------------------------------------------------------

    def append(self, keys: Tensor, values: Tensor, codes: Tensor, columns: Tensor, groups_each: int | None) -> None:
        """Take in the tokens of new columns.

        Args:
            keys: ``(R, H_kv, n, D)``.
            values: ``(R, H_kv, n, D_v)``.
            codes: ``(R, n)``, from `pack`.
            columns: ``(B, S)``, positions of all columns, those that are there and the ``n`` new ones.
            groups_each: each of the new tokens is in exactly this many groups, if that is known.
        """
        count, window = keys.shape[2], self._window
        if groups_each != self.groups_each:
            self.groups_each = None
        new, before = self.rows.by_row(columns[:, columns.shape[1] - count :]), self.next_position
        last = new[:, 0] if count == 1 else new.amax(dim=1)
        self.columns, self.next_position = columns, torch.maximum(before, last + 1)
        self.tokens_gone |= columns.shape[1] > self._ring and not self.rows.all_listed
        self._intact = min(self._intact + count, self._ring)
        if self._waiting + count > self._ring:
            if count <= self.spare:
                self._settle(before - window, self._waiting - window)
            else:
                limit = self.next_position - window
                self._settle(torch.minimum(limit, before), self._waiting)
                kept = (new >= self.pattern.sink_tokens) & (new < limit[:, None])
                self._move(*(self.rows.with_lists(x) for x in (keys, values, codes, new, kept)))
                self._settle_until(torch.maximum(self._settled, limit))
                fits = (new >= self.next_position[:, None] - self._ring) | (new < self.pattern.sink_tokens)
                new, count = torch.where(fits, new, PADDING), 0
        self._waiting += count
        self.recent.write(self._slots(new), keys, values, codes, new)

    def _slots(self, positions: Tensor) -> Tensor:
        """Where recent tokens are; nobody's slot for padding."""
        sinks = self.pattern.sink_tokens
        return torch.where(positions < sinks, positions + 1, positions % self._ring + (sinks + 1))

    def _settle(self, limit: Tensor, most: int) -> None:
        """Move the ring's tokens before these positions ``(R,)``, at most so many, to their lists."""
        positions = self.rows.with_lists(self._settled)[:, None] + torch.arange(most, device=self.device)
        rows = None if self.rows.listed is None else self.rows.listed[:, None]
        keys, values, codes = self.recent.read(self._slots(positions), rows)
        self._move(keys, values, codes, positions, positions < self.rows.with_lists(limit)[:, None])
        self._settle_until(torch.maximum(self._settled, limit))
        self._waiting = self._window

    def _settle_until(self, positions: Tensor) -> None:
        self._settled, self._first = positions, None

    def _move(self, keys: Tensor, values: Tensor, codes: Tensor, positions: Tensor, keep: Tensor) -> None:
        """Append those tokens ``(R', n)`` to their lists that are to be kept."""
        if self.groups_each is None:
            self.pool.add_lists(codes[keep].unique().tolist())
        self.pool.append(keys, values, codes, positions, keep)

    # -- what happens to a cache ---------------------------------------------------------------------------------

    def crop(self, count: int) -> None:
        """Forget the last columns.

        Raises:
            TokensGone: so many that heads would need tokens again that they have let go.
        """
        intact = self._intact - count
        if self.tokens_gone and intact < self._window:
            raise TokensGone(
                f"This cache cannot be cropped by {count} tokens: heads that need their window only keep {self.spare} "
                "tokens beside it. Start from an empty cache, or let it keep everything, from the start, with "
                'focus_hf.set_routing(model, path="masked").'
            )
        self.columns = self.columns[:, : self.columns.shape[1] - count]
        none = self._numbers(self.columns.shape[0], 1, fill=PADDING)
        self.next_position = self.rows.by_row(torch.cat([none, self.columns], dim=1).amax(dim=1) + 1)
        settled = torch.minimum(self._settled, self.next_position - self._window)
        self._settle_until(settled.clamp(min=self.pattern.sink_tokens))
        self._waiting, self._intact = max(self._waiting, self._window), intact
        if intact < self._window:
            self._refill()
        self.pool.take_back(self.rows.with_lists(self._settled))

    def _refill(self) -> None:
        """Put the last tokens back into the ring, from wherever they are."""
        positions = self.next_position[:, None] - 1 - torch.arange(self._ring, device=self.device)
        positions = torch.where(positions >= self.pattern.sink_tokens, positions, PADDING)
        keys, values, codes, _ = self._find(positions)
        self.recent.write(self._slots(positions), keys, values, codes, positions)
        self._intact = self._ring

    def _find(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys, values and codes of tokens by their positions ``(R, n)``, and whether they were found."""
        placed, recent = self._placed(), self.recent.positions.shape[1]
        at = torch.where(placed < self.next_position[:, None], placed + 1, 0)
        slot = torch.arange(at.shape[1], device=self.device).expand_as(at)
        slots = self._numbers(at.shape[0], max(self.columns.shape[1], 1) + 1).scatter_(1, at, slot)
        slots[:, 0] = 0
        slots = slots.gather(1, positions + 1)
        in_lists = slots >= recent
        keys, values, codes = self.recent.read(torch.where(in_lists, 0, slots))
        listed = self.pool.read(self.rows.with_lists(torch.where(in_lists, slots - recent, 0)))
        its_keys, its_values, its_codes = (self.rows.to_all(x, 0) for x in listed)
        which = in_lists[:, None, :, None]
        keys, values = torch.where(which, its_keys, keys), torch.where(which, its_values, values)
        return keys, values, torch.where(in_lists, its_codes, codes), slots > 0

    def select(self, sequences: Tensor) -> None:
        """Go on with these sequences, in this order, some of them perhaps several times."""
        sequences = sequences.to(self.device)
        rows, listed = self.rows.select(sequences)
        self.columns = self.columns.index_select(0, sequences)
        self.next_position, self._settled = (x.index_select(0, rows) for x in (self.next_position, self._settled))
        self.recent.select(rows)
        self.pool.select(listed)
        self._describe_slots()
        self._first = None

    def restore(self) -> tuple[Tensor, Tensor, Tensor]:
        """Every token in its column: keys ``(R, H_kv, S, D)``, values ``(R, H_kv, S, D_v)``, memberships bool
        ``(R, S, K)``.

        Padding, and what heads have let go, has zeros; its memberships are as for any unknown token: all groups.
        """
        keys, values, codes, found = self._find(self.rows.by_row(self.columns))
        memberships = unpack_groups(codes, self.num_groups) | ~found[..., None]
        keys, values = (x.masked_fill(~found[:, None, :, None], 0) for x in (keys, values))
        return keys, values, memberships

    def num_bytes(self) -> int:
        """Memory that it takes."""
        numbers = self.columns, self.next_position, self._settled
        return self.recent.num_bytes() + self.pool.num_bytes() + sum(x.nbytes for x in numbers)
