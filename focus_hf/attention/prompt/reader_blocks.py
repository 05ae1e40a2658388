"""Queries that read groups, in blocks: those of one group that see about as many of its keys, many blocks in one call.

A reader is a query together with one group that it reads. What it sees of the group are its first keys, those beyond
the query's window. On CPU, for `lookup`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .kernels import cpu_flash
from .merge import Accumulator

#: Rows of a block: its readers, once for each query head of a key/value head.
ROWS = 192

#: Numbers that the scores of blocks in one call may hold.
CALL_SIZE = 2**21


@dataclass(frozen=True)
class Readers:
    """Readers, by query.

    Args:
        query: ``(R,)`` ascending, which of the queries at hand.
        group: ``(R,)``.
        limits: ``(R,)``, at least 1: how many of the group's first keys it sees.
    """

    query: Tensor
    group: Tensor
    limits: Tensor


@dataclass(frozen=True)
class Blocks:
    """Readers of one group each, in blocks; those with the most keys first.

    Args:
        readers: ``(n, size)``, which readers; the last of a block again where it is not full.
        start: ``(n,)``, where the keys of its group begin.
        num_keys: how many of them the block sees.
        slots: ``(R,)``, where each reader is: ``size`` times its block, plus its place there.
    """

    readers: Tensor
    start: Tensor
    num_keys: list[int]
    slots: Tensor


def make_blocks(readers: Readers, key_edges: Tensor, size: int) -> Blocks:
    """Blocks of up to ``size`` readers, who stand in them in the order of what they see.

    Args:
        readers: at least one.
        key_edges: ``(K + 1,)``, where the keys of each group begin and end.
        size: readers of a block.
    """
    groups = torch.arange(key_edges.shape[0])
    group, by_group = readers.group.sort(stable=True)
    edges = torch.searchsorted(group, groups)
    size = min(size, int(edges.diff().max()))
    count = (edges.diff() + size - 1) // size
    first_block = count.cumsum(dim=0) - count
    of_group = groups[:-1].repeat_interleave(count)
    first = edges[of_group] + (torch.arange(of_group.shape[0]) - first_block[of_group]) * size
    last = torch.minimum(first + size, edges[of_group + 1]) - 1
    num_keys, order = readers.limits[by_group[last]].sort(descending=True)
    rows = torch.minimum(first[order, None] + torch.arange(size), last[order, None])
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0]))
    within = torch.arange(group.shape[0]) - edges[group]
    sorted_slots = place[first_block[group] + within // size] * size + within % size
    slots = torch.empty_like(by_group).scatter_(0, by_group, sorted_slots)
    return Blocks(by_group[rows], key_edges[of_group[order]], num_keys.tolist(), slots)


def calls(num_keys: list[int], row_size: int) -> Iterator[slice]:
    """Blocks to be computed together: they see nearly as many keys, and are not too many.

    Args:
        num_keys: of each block, falling.
        row_size: rows of a block.
    """
    start = 0
    while start < len(num_keys):
        most, stop = num_keys[start], start + 1
        limit = min(len(num_keys), start + max(1, CALL_SIZE // (row_size * max(most, 64))))
        while stop < limit and num_keys[stop] >= 0.75 * most - 16:
            stop += 1
        yield slice(start, stop)
        start = stop


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, readers: Readers, blocks: Blocks, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of every reader over what it sees of its group.

    Args:
        q: ``(Q, H, D)``, which the readers name.
        k, v: ``(S, H_kv, D)`` and ``(S, H_kv, D_v)``.
        keys: which of the ``S``, by group.
        readers, blocks: see there.
        scale: factor on ``q . k``.

    Returns:
        Output ``(n * size * repeat, H_kv, D_v)`` and logsumexp ``(n * size * repeat, H_kv)`` by slot, with
        ``repeat = H / H_kv``.
    """
    size, kv_heads = blocks.readers.shape[1], k.shape[1]
    repeat, outputs, logs = q.shape[1] // kv_heads, [], []
    lowest = torch.finfo(q.dtype).min
    for some in calls(blocks.num_keys, size * repeat):
        rows, width = blocks.readers[some], blocks.num_keys[some.start]
        own = (blocks.start[some, None] + torch.arange(width)).clamp_(max=keys.shape[0] - 1)
        index = keys[own.flatten()]
        some_k, some_v = (x.index_select(0, index).unflatten(0, own.shape) for x in (k, v))
        some_q = q.index_select(0, readers.query[rows.flatten()])
        some_q = some_q.view(-1, size, kv_heads, repeat, q.shape[-1]).transpose(2, 3).flatten(1, 2)
        hidden = torch.arange(width) >= readers.limits[rows][..., None]
        bias = torch.zeros(rows.shape[0], size, repeat, width, dtype=q.dtype)
        bias = bias.masked_fill_(hidden[:, :, None], lowest).flatten(1, 2)[:, None]
        output, lse = cpu_flash(some_q, some_k, some_v, scale, bias=bias)
        outputs.append(output.flatten(0, 1))
        logs.append(lse.flatten(0, 1))
    return torch.cat(outputs), torch.cat(logs)


def add_readers(
    whole: Accumulator,
    index: Tensor,
    output: Tensor,
    lse: Tensor,
    readers: Readers,
    slots: Tensor,
) -> None:
    """Add what readers found to what there is of their queries.

    Args:
        whole: of all queries.
        index: ``(Q,)``, which of them are at hand.
        output, lse: from `attend_blocks`.
        readers: see there.
        slots: of `Blocks`.
    """
    num_queries, kv_heads = index.shape[0], lse.shape[1]
    repeat = whole.lse.shape[1] // kv_heads
    starts = torch.searchsorted(readers.query, torch.arange(num_queries + 1))
    column, most = torch.arange(readers.query.shape[0]) - starts[readers.query], int(starts.diff().max())
    table = slots.new_full((num_queries, most), -1).index_put_((readers.query, column), slots)
    heads = torch.arange(repeat) * kv_heads + torch.arange(kv_heads)[:, None]
    where = table.clamp(min=0)[:, None] * (repeat * kv_heads) + heads.flatten()[:, None]  # (Q, H, most)
    output, lse = output.to(whole.output.dtype), lse.to(whole.lse.dtype)
    logs = lse.flatten()[where].masked_fill_(table[:, None] < 0, float("-inf"))
    current = whole.lse.index_select(0, index)
    total = torch.logaddexp(current, logs.logsumexp(dim=-1))
    shares = (logs - total[..., None]).exp_().flatten(0, 1)
    found = torch.nn.functional.embedding_bag(
        where.flatten(0, 1), output.flatten(0, 1), mode="sum", per_sample_weights=shares
    )
    before = whole.output.index_select(0, index) * (current - total).exp_()[..., None]
    whole.put(index, before.add_(found.view_as(before)), total)
