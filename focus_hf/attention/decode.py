"""Attention of new tokens against a cache stored by groups (`store`), which takes them in.

On kernels that work on one row at a time (a CPU's), each row reads the stretches of its lists, one call after the
other. Elsewhere all rows are one call: of a kernel that follows page tables, for single tokens, or under a mask over
the whole pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .decode_fetched import attend_pieces
from .grouped import attend_parts
from .host_tier import TieredPool
from .kernels import Call, Kernel, Pages
from .mask import PADDING, WhoAttends
from .masked import attend_under_mask, masked_with_lse
from .merge import Accumulator
from .plan import make_plan
from .problem import Scores
from .rows import Rows
from .store import GroupedStore, unpack_groups

#: From this many queries on, the recent tokens are worth a plan of their own.
PLAN_QUERIES = 64


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
) -> Tensor:
    """Attention of new tokens, which are then part of the store.

    Args:
        store: what was cached before them.
        query: ``(B, H, Q, D)``.
        key: ``(B, H_kv, Q, D)``.
        value: ``(B, H_kv, Q, D_v)``.
        columns: ``(B, S)``, positions of all columns of the cache, the ``Q`` new ones last.
        memberships: bool ``(B, Q, K)``.
        scores: plain ones.
        kernel: the backend. One that takes many rows can take as many queries as `takes` says.
        groups_each: each of the new tokens is in exactly this many groups, if that is known.

    Returns:
        ``(B, H, Q, D_v)``, zeros for padding.
    """
    codes, num_queries = store.pack(memberships), query.shape[2]
    if isinstance(store.pool, TieredPool):
        return attend_pieces(store, store.pool, query, (key, value, codes, columns, groups_each), scores, kernel)
    if kernel.one_row_at_a_time:
        return _attend_row_by_row(store, query, key, value, (codes, columns, groups_each), scores, kernel)
    positions = columns[:, columns.shape[1] - num_queries :]
    store.append(key, value, codes, columns, groups_each)
    pool = store.pool
    if num_queries > 1 or kernel.paged is None or value.shape[-1] != key.shape[-1]:
        every_slot = slice(1, None)
        visible = store.visible(positions, codes, every_slot)[:, None]
        return attend_under_mask(query, pool.keys[:, :, every_slot], pool.values[:, :, every_slot], visible, scores)
    visible = store.visible(positions, codes, store.recent)[:, 0]
    pages = Pages(visible, store.reads(positions, codes)[:, 0], pool.lengths, pool.tables, pool.page)
    output, lse = kernel.paged(query[:, :, 0], pool.keys, pool.values, pages, scores.scale)
    if scores.sink_logits is not None:
        output = output * torch.sigmoid(lse - scores.sink_logits.to(lse.dtype))[..., None]
    return output[:, :, None].to(query.dtype)


def takes(store: GroupedStore, num_queries: int, kernel: Kernel) -> bool:
    """Whether so many new tokens can be attended against the store as it is."""
    return kernel.one_row_at_a_time or num_queries <= store.spare or isinstance(store.pool, TieredPool)


def _attend_singles(
    store: GroupedStore, query: Tensor, positions: Tensor, codes: Tensor, scores: Scores, kernel: Kernel
) -> Tensor:
    """One token of each row, which the ring has taken in; the time goes into the number of operations."""
    left_out = store.visible(positions, codes, store.recent).logical_not_()[:, 0, :, None]
    all_pairs, pools = left_out.new_ones(1, 1), _pools(store)
    output = query.new_zeros(query.shape[0], 1, query.shape[1], store.pool.values.shape[-1])
    for row, (position, code) in enumerate(zip(positions[:, 0].tolist(), codes[:, 0].tolist(), strict=True)):
        if position == PADDING:
            continue
        own, everything = query[row].transpose(0, 1), position < store.pattern.dense_below
        parts = [_attend_all(own, pools, row, store.recent, scores.scale, kernel, (all_pairs, left_out[row]))]
        for groups, stretches in store.pool.runs(row):
            if everything or groups & code:
                parts += [_attend_all(own, pools, row, slots, scores.scale, kernel) for slots in stretches]
        whole = Accumulator(1, own.shape[1], output.shape[-1], own, every_query=True)
        whole.put_parts(parts)
        if scores.sink_logits is not None:
            whole.add_logits(scores.sink_logits)
        output[row] = whole.output
    return output.transpose(1, 2)


def _attend_row_by_row(
    store: GroupedStore,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    new: tuple[Tensor, Tensor, int | None],
    scores: Scores,
    kernel: Kernel,
) -> Tensor:
    codes, columns, groups_each = new
    num_queries = query.shape[2]
    positions = columns[:, columns.shape[1] - num_queries :]
    is_chunk = num_queries >= PLAN_QUERIES or num_queries > store.spare
    visible = None
    if not is_chunk:
        store.append(key, value, codes, columns, groups_each)
        if num_queries == 1:
            return _attend_singles(store, query, positions, codes, scores, kernel)
        visible = store.visible(positions, codes, store.recent)
    output = query.new_zeros(query.shape[0], num_queries, query.shape[1], value.shape[-1])
    for row in range(query.shape[0]):
        real = (positions[row] != PADDING).nonzero().squeeze(-1)
        if not len(real):
            continue
        asking = Asking(query[row].transpose(0, 1)[real], positions[row, real], codes[row, real])
        if visible is None:
            own = key[row, :, real].transpose(0, 1), value[row, :, real].transpose(0, 1)
            whole = _attend_chunk(store, row, asking, own, scores.scale, kernel)
        else:
            whole = _attend_few(store, row, asking, visible[row, real], scores.scale, kernel)
        if scores.sink_logits is not None:
            whole.add_logits(scores.sink_logits)
        output[row, real] = whole.output.to(output.dtype)
    if is_chunk:
        store.append(key, value, codes, columns, groups_each)
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
    query = asking.query
    whole = Accumulator(query.shape[0], query.shape[1], store.pool.values.shape[-1], query, every_query=True)
    k, v = (pool[row, store.recent] for pool in _pools(store))
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
    everything, pools = asking.positions < store.pattern.dense_below, _pools(store)
    for code, stretches in store.pool.runs(row):
        index = ((asking.codes & code != 0) | everything).nonzero().squeeze(-1)
        if index.numel():
            for slots in stretches:
                whole.add(index, *_attend_all(asking.query[index], pools, row, slots, scale, kernel))


#: Keys and values, token-major: ``(B, N, H_kv, D)``.
_Pools = tuple[Tensor, Tensor]


def _pools(store: GroupedStore) -> _Pools:
    return store.pool.keys.transpose(1, 2), store.pool.values.transpose(1, 2)


def _attend_all(
    query: Tensor,
    pools: _Pools,
    row: int,
    slots: slice,
    scale: float,
    kernel: Kernel,
    exclude: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Every query ``(Q, H, D)`` with every slot, some of them excluded."""
    rows = Rows.single(query.shape[0], slots.stop - slots.start, query.device)
    call = Call(rows, scale, exclude=exclude, causal=False)
    return kernel.forward(query, pools[0][row, slots], pools[1][row, slots], call)
