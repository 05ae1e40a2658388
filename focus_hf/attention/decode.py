"""Attention of new tokens against a cache stored by groups (`store`), which takes them in.

On kernels that work on one row at a time (a CPU's), each row reads the stretches of its lists, one call after the
other. Elsewhere all rows are one call: of a kernel that follows page tables, for single tokens, or under a mask over
the whole pool. What is in host memory is fetched first (`decode_fetched`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .decode_fetched import New, attend_pieces
from .group_codes import unpack_groups
from .grouped import attend_parts
from .host_tier import TieredPool
from .kernels import Call, Kernel, Pages
from .mask import PADDING, WhoAttends
from .masked import attend_under_mask, masked_with_lse
from .merge import Accumulator
from .plan import make_plan
from .problem import Scores
from .rows import Rows
from .store import GroupedStore

#: From this many queries on, the recent tokens are worth a plan of their own.
PLAN_QUERIES = 64

#: Stretches of fewer tokens than this are copied together, to be read in one call.
SHORT = 256


def attend_store(
    store: GroupedStore,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    columns: Tensor,
    memberships: Tensor,
    scores: Scores,
    kernel: Kernel,
    groups_each: int | None = None,
    reads: Tensor | None = None,
) -> Tensor:
    """Attention of new tokens, which are then part of the store.

    Args:
        store: what was cached before them.
        query: ``(B, H, Q, D)``.
        key: ``(B, H_kv, Q, D)``.
        value: ``(B, H_kv, Q, D_v)``.
        columns: ``(B, S)``, positions of all columns of the cache, the ``Q`` new ones last.
        memberships: bool ``(R, Q, K)``, of each row of the store.
        scores: plain ones; without sink logits where heads are rows.
        kernel: the backend. How many queries it can take at once, `takes` says.
        groups_each: each of the new tokens is in exactly this many groups, if that is known.
        reads: bool ``(R, Q, K)``, the groups that they read, where these are not their own.

    Returns:
        ``(B, H, Q, D_v)``, zeros for padding.
    """
    codes = store.pack(memberships)
    asked = codes if reads is None else store.pack(reads)
    rows, shape = codes.shape[0], (*query.shape[:3], value.shape[-1])
    query, key, value = (x.reshape(rows, -1, *x.shape[2:]) for x in (query, key, value))
    new = New(key, value, codes, columns, groups_each)
    positions = store.rows.by_row(columns[:, columns.shape[1] - query.shape[2] :])
    attend = _attend_row_by_row if kernel.one_row_at_a_time else _attend_at_once
    if isinstance(store.pool, TieredPool):
        attend = attend_pieces
    return attend(store, query, positions, asked, new, scores, kernel).reshape(shape)


def takes(store: GroupedStore, num_queries: int, kernel: Kernel) -> bool:
    """Whether so many new tokens can be attended against the store as it is."""
    alike = kernel.one_row_at_a_time and not store.heads
    return num_queries <= store.spare or alike or isinstance(store.pool, TieredPool)


def _attend_at_once(
    store: GroupedStore,
    query: Tensor,
    positions: Tensor,
    asked: Tensor,
    new: New,
    scores: Scores,
    kernel: Kernel,
) -> Tensor:
    """All rows in one call: ``(R, H, Q, D_v)``."""
    new.enter(store)
    if query.shape[2] > 1 or kernel.paged is None or new.values.shape[-1] != new.keys.shape[-1]:
        keys, values, visible = store.visible_everywhere(positions, asked)
        return attend_under_mask(query, keys, values, visible[:, None], scores)
    recent, pool = store.recent, store.pool
    pages = Pages(
        (recent.keys, recent.values),
        store.visible(positions, asked)[:, 0],
        (pool.keys, pool.values),
        store.reads(positions, asked)[:, 0],
        pool.lengths,
        pool.tables,
        store.rows.places,
        pool.page,
    )
    output, lse = kernel.paged(query[:, :, 0], pages, scores.scale)
    if scores.sink_logits is not None:
        output = output * torch.sigmoid(lse - scores.sink_logits.to(lse.dtype))[..., None]
    return output[:, :, None].to(query.dtype)


def _attend_singles(
    store: GroupedStore, query: Tensor, positions: Tensor, asked: Tensor, scores: Scores, kernel: Kernel
) -> Tensor:
    """One token of each row, which the ring has taken in; the time goes into the number of operations."""
    left_out = store.visible(positions, asked).logical_not_()[:, 0, :, None]
    all_pairs = left_out.new_ones(1, 1)
    output = query.new_zeros(query.shape[0], 1, query.shape[1], store.recent.values.shape[-1])
    for row, (position, code) in enumerate(zip(positions[:, 0].tolist(), asked[:, 0].tolist(), strict=True)):
        if position == PADDING:
            continue
        own, everything = query[row].transpose(0, 1), position < store.pattern.dense_below
        parts = [_attend_all(own, *_recent(store, row), scores.scale, kernel, (all_pairs, left_out[row]))]
        place, lists = store.runs(row)
        read = [slots for groups, stretches in lists if everything or groups & code for slots in stretches]
        parts += [_attend_all(own, k, v, scores.scale, kernel) for k, v in _joined(store, place, read)]
        whole = Accumulator(1, own.shape[1], output.shape[-1], own, every_query=True)
        whole.put_parts(parts)
        if scores.sink_logits is not None:
            whole.add_logits(scores.sink_logits)
        output[row] = whole.output
    return output.transpose(1, 2)


def _attend_row_by_row(
    store: GroupedStore,
    query: Tensor,
    positions: Tensor,
    asked: Tensor,
    new: New,
    scores: Scores,
    kernel: Kernel,
) -> Tensor:
    num_queries = query.shape[2]
    is_chunk = not store.heads and (num_queries >= PLAN_QUERIES or num_queries > store.spare)
    visible = None
    if not is_chunk:
        new.enter(store)
        if num_queries == 1:
            return _attend_singles(store, query, positions, asked, scores, kernel)
        visible = store.visible(positions, asked)
    output = query.new_zeros(query.shape[0], num_queries, query.shape[1], new.values.shape[-1])
    for row in range(query.shape[0]):
        real = (positions[row] != PADDING).nonzero().squeeze(-1)
        if not len(real):
            continue
        asking = Asking(query[row].transpose(0, 1)[real], positions[row, real], asked[row, real])
        if visible is None:
            own = new.keys[row, :, real].transpose(0, 1), new.values[row, :, real].transpose(0, 1)
            whole = _attend_chunk(store, row, asking, own, scores.scale, kernel)
        else:
            whole = _attend_few(store, row, asking, visible[row, real], scores.scale, kernel)
        if scores.sink_logits is not None:
            whole.add_logits(scores.sink_logits)
        output[row, real] = whole.output.to(output.dtype)
    if is_chunk:
        new.enter(store)
    return output.transpose(1, 2)


@dataclass(frozen=True)
class Asking:
    """New tokens of one row, none of them padding: queries ``(Q, H, D)``, positions and codes ``(Q,)``."""

    query: Tensor
    positions: Tensor
    codes: Tensor


def _attend_few(
    store: GroupedStore, row: int, asking: Asking, visible: Tensor, scale: float, kernel: Kernel
) -> Accumulator:
    """Some tokens that the ring has taken in."""
    query, (k, v) = asking.query, _recent(store, row)
    whole = Accumulator(query.shape[0], query.shape[1], v.shape[-1], query, every_query=True)
    whole.put(slice(0, query.shape[0]), *masked_with_lse(query, k, v, visible, scale))
    _add_lists(whole, store, row, asking, scale, kernel)
    return whole


def _attend_chunk(
    store: GroupedStore, row: int, asking: Asking, new: tuple[Tensor, Tensor], scale: float, kernel: Kernel
) -> Accumulator:
    """Many tokens that are not in the store yet: ``new`` are their keys and values, ``(Q, H_kv, D)``."""
    keys, values, codes, positions = store.in_order(row)
    k, v = torch.cat([keys.transpose(0, 1), new[0]]), torch.cat([values.transpose(0, 1), new[1]])
    positions, codes = torch.cat([positions, asking.positions]), torch.cat([codes, asking.codes])
    memberships = unpack_groups(codes, store.num_groups)
    plan = make_plan(WhoAttends(store.pattern, positions[None], memberships[None]), asking.query.shape[0])
    whole = attend_parts(asking.query, k, v, plan, scale, kernel)
    _add_lists(whole, store, row, asking, scale, kernel)
    return whole


def _add_lists(
    whole: Accumulator, store: GroupedStore, row: int, asking: Asking, scale: float, kernel: Kernel
) -> None:
    everything, (place, lists) = asking.positions < store.pattern.dense_below, store.runs(row)
    for code, stretches in lists:
        index = ((asking.codes & code != 0) | everything).nonzero().squeeze(-1)
        if index.numel():
            for k, v in _joined(store, place, stretches):
                whole.add(index, *_attend_all(asking.query[index], k, v, scale, kernel))


def _recent(store: GroupedStore, row: int) -> tuple[Tensor, Tensor]:
    """A row's recent keys and values, ``(n, H_kv, D)``."""
    return store.recent.keys[row, :, 1:].transpose(0, 1), store.recent.values[row, :, 1:].transpose(0, 1)


def _joined(store: GroupedStore, place: int, stretches: list[slice]) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values of stretches of the pool, ``(n, H_kv, D)``, short ones copied together."""
    if not stretches:
        return
    keys, values = (x[place].transpose(0, 1) for x in (store.pool.keys, store.pool.values))
    short = [slots for slots in stretches if slots.stop - slots.start < SHORT]
    if len(short) > 1:
        yield torch.cat([keys[slots] for slots in short]), torch.cat([values[slots] for slots in short])
    for slots in stretches:
        if len(short) < 2 or slots.stop - slots.start >= SHORT:
            yield keys[slots], values[slots]


def _attend_all(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    kernel: Kernel,
    exclude: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Every query ``(Q, H, D)`` with every key, some of them excluded."""
    call = Call(Rows.single(query.shape[0], key.shape[0], query.device), scale, exclude=exclude, causal=False)
    return kernel.forward(query, key, value, call)
