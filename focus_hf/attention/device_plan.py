"""Which tokens meet in which call, decided on the device: the decomposition of `plan`, with nothing read back.

Every shape is known beforehand (`mask.Known`): a token is in ``k`` groups and a sink in all ``K`` of them, so the
groups take ``B * (S * k + sinks * (K - k))`` places whatever the data. Candidates are sorted by the row that they
belong to; those that belong to none come last, behind the last offset, where kernels do not look and results are never
read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .mask import PADDING, Known, WhoAttends
from .rows import DeviceRows

#: No token has a position beyond it: a ``dense_below`` that is larger makes all queries dense.
LAST_POSITION = 2**30


@dataclass(frozen=True)
class DevicePart:
    """A part of the attended pairs.

    Args:
        queries: ``(n,)``, indices of the rows' queries into the flat queries of the call; ``None`` for all, in order.
        keys: ``(m,)``, likewise into the flat keys.
        rows: where each row begins and ends in the two.
        slots: ``(B * Q, c)``, where among the ``n`` the results of each flat query are, all of which count; ``None``
            where ``queries`` is. Of a query that has no place in this part the entry means nothing.
        window, causal, exclude: see `kernels.Call`.
        no_keys: ``(B * Q,)`` bool, queries whose row may have no keys.
    """

    queries: Tensor | None
    keys: Tensor | None
    rows: DeviceRows
    slots: Tensor | None = None
    window: int | None = None
    causal: bool = True
    exclude: tuple[Tensor, Tensor] | None = None
    no_keys: Tensor | None = None


@dataclass(frozen=True)
class DevicePlan:
    """The parts of one attention call over flat tokens.

    Args:
        parts: of queries that are not dense, disjoint: their results are merged. What they say of others is not used.
        dense: of queries below ``dense_below``, alone.
        is_dense: ``(B * Q,)`` bool, which these are.
        is_real: ``(B * Q,)`` bool, ``False`` for padding; ``None`` where there is none.
    """

    parts: tuple[DevicePart, ...]
    dense: DevicePart | None
    is_dense: Tensor | None
    is_real: Tensor | None


@dataclass(frozen=True)
class SortedRows:
    """Candidates by row: all of them in order, and where each row begins; the last offset is the end of all rows."""

    order: Tensor
    offsets: Tensor

    @classmethod
    def by_row(cls, row: Tensor, numbers: Tensor) -> SortedRows:
        """Sort candidates by row, in their order within one; ``numbers`` are those of all rows, and that of none."""
        rows, order = torch.sort(row.flatten(), stable=True)
        return cls(order, torch.searchsorted(rows, numbers, out_int32=True))

    def places(self) -> Tensor:
        """Where each candidate went."""
        index = torch.arange(self.order.shape[0], device=self.order.device)
        return torch.empty_like(self.order).scatter_(0, self.order, index)


class Tokens:
    """Facts of a call's tokens: ``(B, S)`` of all, and of the last ``Q`` of each sequence, which are queries."""

    def __init__(self, who: WhoAttends, known: Known, num_queries: int) -> None:
        self.positions, self.known = who.positions, known
        self.batch, self.num_keys = who.positions.shape
        self.num_queries = num_queries
        self.real = None if known.unpadded else who.positions != PADDING
        self.num_segments = self.batch * known.documents_each
        device = who.positions.device
        self.segments = torch.arange(self.num_segments + 1, device=device)  # their numbers, and that of none
        segment = self.segments[: -1 : known.documents_each, None]
        if known.documents_each > 1:  # a document begins at position 0
            rank = (who.positions == 0).cumsum(dim=1) - 1
            segment = segment + rank.clamp(0, known.documents_each - 1)
        self.segment = segment.expand(self.batch, self.num_keys)

    def asking(self, facts: Tensor) -> Tensor:
        """Of the queries."""
        return facts[:, self.num_keys - self.num_queries :]

    def by_segment(self, drop: Tensor | None, queries: bool) -> SortedRows:
        """Tokens but for those that are dropped, as padding always is, by document; of the queries only, or of all."""
        if self.real is not None:
            drop = ~self.real if drop is None else drop | ~self.real
        row = self.segment if drop is None else self.segment.masked_fill(drop, self.num_segments)
        return SortedRows.by_row(self.asking(row) if queries else row, self.segments)

    def part(self, queries: SortedRows, keys: SortedRows, most_keys: int) -> DevicePart:
        """Rows by document, of which each has at most so many keys."""
        places = self.num_segments * most_keys
        rows = DeviceRows(queries.offsets, keys.offsets, self.num_queries, most_keys)
        return DevicePart(queries.order, keys.order[:places], rows, queries.places()[:, None])


def make_device_plan(who: WhoAttends, num_queries: int) -> DevicePlan:
    """Plan one call, of which ``who.known`` says enough; the queries are the last ``num_queries`` tokens."""
    known = who.known
    assert known is not None and known.groups_each is not None
    tokens, pattern = Tokens(who, known, num_queries), who.pattern
    is_real = None if tokens.real is None else tokens.asking(tokens.real).flatten()
    if pattern.dense_below > LAST_POSITION:
        return DevicePlan((_window_part(tokens, None),), None, None, is_real)
    dense_below, sinks_apart = pattern.dense_below, not known.groups_each and pattern.sink_tokens > 0
    if sinks_apart:  # then no sink is in the window of any other query
        dense_below = max(dense_below, pattern.local_window + pattern.sink_tokens + 1)
    below = tokens.positions < dense_below if dense_below else None
    beyond = None if below is None else ~below

    dense = is_dense = None
    if below is not None:
        is_dense = tokens.asking(below).flatten()
        most = min(tokens.num_keys, dense_below)
        dense = tokens.part(tokens.by_segment(beyond, queries=True), tokens.by_segment(beyond, queries=False), most)

    in_groups = _in_groups(who, tokens) if known.groups_each else None
    groups = (
        None if in_groups is None else _group_part(tokens, in_groups, below, known.groups_each, pattern.sink_tokens)
    )
    window = _window_part(tokens, below)
    exclude = None
    if in_groups is not None:
        of_queries, of_keys = tokens.asking(in_groups).flatten(0, 1), in_groups.flatten(0, 1)
        exclude = _take(of_queries, window.queries), _take(of_keys, window.keys)
    window = replace(window, window=pattern.local_window, exclude=exclude)
    sinks = _sink_part(tokens, window, pattern.sink_tokens) if sinks_apart else None
    return DevicePlan(tuple(part for part in (groups, window, sinks) if part is not None), dense, is_dense, is_real)


def _take(facts: Tensor, index: Tensor | None) -> Tensor:
    return facts if index is None else facts.index_select(0, index)


def _window_part(tokens: Tokens, below: Tensor | None) -> DevicePart:
    """Whole documents, without the queries that are dense where tokens have to be moved anyhow."""
    if tokens.real is None and tokens.known.documents_each == 1:  # nothing to be moved
        starts = torch.arange(tokens.batch + 1, dtype=torch.int32, device=tokens.positions.device)
        offsets = starts * tokens.num_queries, starts * tokens.num_keys
        return DevicePart(None, None, DeviceRows(*offsets, tokens.num_queries, tokens.num_keys))
    keys = tokens.by_segment(None, queries=False)
    same = below is None and tokens.num_queries == tokens.num_keys
    part = tokens.part(keys if same else tokens.by_segment(below, queries=True), keys, tokens.num_keys)
    return replace(part, keys=keys.order)


def _sink_part(tokens: Tokens, window: DevicePart, sink_tokens: int) -> DevicePart:
    """The window's queries with all sinks of their document; a sliding cache may have dropped these."""
    keys = tokens.by_segment(tokens.positions >= sink_tokens, queries=False)
    most = min(sink_tokens, tokens.num_keys)
    rows = DeviceRows(window.rows.cu_queries, keys.offsets, tokens.num_queries, most)
    empty = keys.offsets[1:] == keys.offsets[:-1]
    no_keys = empty[tokens.asking(tokens.segment).flatten()]
    part = DevicePart(window.queries, keys.order[: tokens.num_segments * most], rows, window.slots)
    return replace(part, causal=False, no_keys=no_keys)


def _in_groups(who: WhoAttends, tokens: Tokens) -> Tensor:
    """bool ``(B, S, K)``: a sink is in every group, padding in none."""
    in_groups = who.memberships
    if who.pattern.sink_tokens:
        in_groups = in_groups | (who.positions < who.pattern.sink_tokens)[..., None]
    return in_groups if tokens.real is None else in_groups & tokens.real[..., None]


def _group_part(
    tokens: Tokens, in_groups: Tensor, below: Tensor | None, groups_each: int, sink_tokens: int
) -> DevicePart:
    """Each token in each of its groups. A sink's results are the same in all of its rows, but for exclusions."""
    num_groups, device = in_groups.shape[-1], in_groups.device
    num_rows = tokens.num_segments * num_groups
    row = (tokens.segment * num_groups)[..., None] + torch.arange(num_groups, device=device)
    row = torch.where(in_groups, row, num_rows)
    numbers = torch.arange(num_rows + 1, device=device)
    keys = queries = SortedRows.by_row(row, numbers)
    if below is not None or tokens.num_queries < tokens.num_keys:
        of_queries = row if below is None else row.masked_fill(below[..., None], num_rows)
        queries = SortedRows.by_row(tokens.asking(of_queries), numbers)

    more = tokens.num_segments * min(sink_tokens, tokens.num_keys) * (num_groups - groups_each)
    num_slots = min(tokens.batch * tokens.num_queries * groups_each + more, queries.order.shape[0])
    key_order = keys.order[: tokens.batch * tokens.num_keys * groups_each + more]
    query_order = queries.order[:num_slots]

    asking = tokens.asking(in_groups).flatten(0, 1)
    chosen = asking.byte()
    if groups_each == 1:
        own = chosen.argmax(dim=-1, keepdim=True)
    else:  # the lowest come first: there a sink meets the sinks
        own = chosen.sort(dim=-1, descending=True, stable=True).indices[:, :groups_each]
    slots = queries.places().view(-1, num_groups).gather(1, own)
    if below is not None or tokens.real is not None:  # queries without a place
        slots = slots.clamp(max=num_slots - 1)

    rows = DeviceRows(queries.offsets, keys.offsets, tokens.num_queries, tokens.num_keys)
    key_index, key_columns = _places(in_groups.flatten(0, 1), key_order, groups_each)
    if queries is keys:
        query_index, query_columns = key_index, key_columns
    else:
        query_index, query_columns = _places(asking, query_order, groups_each)
    exclude = None if key_columns is None or query_columns is None else (query_columns, key_columns)
    return DevicePart(query_index, key_index, rows, slots, exclude=exclude)


def _places(in_groups: Tensor, order: Tensor, groups_each: int) -> tuple[Tensor, Tensor | None]:
    """Which token is at each place of the groups' rows, and which lower-numbered groups it is in: tokens that share
    one of these have met before. ``None`` where tokens are in one group."""
    num_groups = in_groups.shape[-1]
    token = order // num_groups
    if groups_each == 1:
        return token, None
    lower = torch.arange(num_groups, device=order.device) < (order % num_groups)[:, None]
    return token, in_groups.index_select(0, token) & lower
