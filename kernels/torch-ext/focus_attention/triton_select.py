"""Which keys the newest tokens attend to, as short lists on the device: the first of two kernels of decoding.

It reads a byte for each key and the queries' tables, and writes where the attended keys stand. Import it only where
Triton is installed. Nothing here knows the rest of the package: the folder `kernels/` is made from these files.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Keys that a program looks at in one step, and the most programs for one key head.
STEP, MAX_CHUNKS = 512, 64

WARPS = 4


@dataclass(frozen=True)
class Shape:
    """The attention pattern besides groups, see `definition.Pattern`; compiled into the kernels."""

    local_window: int
    sink_tokens: int
    dense_below: int


@dataclass(frozen=True)
class KeyLists:
    """Where the keys stand that at least one query of a sequence attends to, for each key head.

    Args:
        slots: int32 ``(B, H_kv, bound)``, in chunks: a chunk's entries are at its beginning, in ascending order.
        counts: int32 ``(B, H_kv, chunks)``, how many each chunk has, of at most `MAX_CHUNKS`.
        chunk: places of a chunk.
    """

    slots: Tensor
    counts: Tensor
    chunk: int


def select_keys(
    key_groups: Tensor,
    reads: Tensor,
    query_positions: Tensor,
    shape: Shape,
    *,
    key_positions: Tensor | None = None,
    block_table: Tensor | None = None,
) -> KeyLists:
    """List the keys that queries attend to: one launch, the same one for any values.

    Args:
        key_groups: uint8 ``(B, H_kv, S)``; with a block table ``(blocks, H_kv, block size)``. Any strides.
        reads: bool ``(B, H_kv, Q, K, bands)``, of few queries, contiguous.
        query_positions: int32 or int64 ``(B, Q)``, contiguous; -1 for a query that attends to nothing.
        shape: window, sinks, dense start.
        key_positions: ``(B, S)``, -1 for padding; without them a key's place is its position.
        block_table: int32 ``(B, most blocks)``.

    Returns:
        The lists. Of one query with a block table an entry is already ``block * block size + place in the block``.
    """
    batch, kv_heads, queries, groups, bands = reads.shape
    block = 0 if block_table is None else key_groups.shape[2]
    bound = key_groups.shape[2] if block_table is None else block_table.shape[1] * block
    chunk = triton.cdiv(triton.cdiv(bound, MAX_CHUNKS), STEP) * STEP
    chunks = triton.cdiv(bound, chunk)
    slots = torch.empty(batch, kv_heads, bound, dtype=torch.int32, device=reads.device)
    counts = torch.empty(batch, kv_heads, chunks, dtype=torch.int32, device=reads.device)
    _select[(batch * kv_heads, chunks)](
        *(key_groups, reads.view(torch.uint8), query_positions, key_positions, block_table, slots, counts),
        *(bound, chunk, kv_heads, *key_groups.stride()),
        0 if key_positions is None else key_positions.stride(0),
        0 if block_table is None else block_table.stride(0),
        QUERIES=queries,
        GROUPS=groups,
        BANDS=bands,
        WINDOW=shape.local_window,
        SINKS=shape.sink_tokens,
        DENSE=shape.dense_below,
        BLOCK=block,
        STEP=STEP,
        num_warps=WARPS,
    )
    return KeyLists(slots, counts, chunk)


@triton.jit
def attended(  # type: ignore[no-untyped-def]  # Triton's types are those of its arguments
    table, group, i, j, BANDS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, DENSE: tl.constexpr, mask
):
    """Whether queries at ``i`` attend to keys at ``j``: `definition.attended_pairs`, where ``mask`` says so."""
    distance = i - j
    band = tl.zeros_like(distance)
    for number in tl.static_range(1, BANDS):
        band += (distance > (max(WINDOW, 1) << number)).to(band.dtype)
    near = (distance <= WINDOW) | (j < SINKS) | (i < DENSE)
    causal = mask & (distance >= 0) & (j >= 0)
    far = tl.load(table + group * BANDS + band, mask=causal & (near == 0), other=0) != 0
    return causal & (near | far)


@triton.jit(do_not_specialize=["bound", "chunk", "groups_row", "groups_head", "positions_row", "table_row"])
def _select(  # type: ignore[no-untyped-def]
    key_groups,
    reads,
    query_positions,
    key_positions,
    block_table,
    slots,
    counts,
    bound,
    chunk,
    kv_heads,
    groups_row,
    groups_head,
    groups_place,
    positions_row,
    table_row,
    QUERIES: tl.constexpr,
    GROUPS: tl.constexpr,
    BANDS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    DENSE: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    own, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, head = own // kv_heads, own % kv_heads
    last = tl.load(query_positions + row * QUERIES)
    for query in tl.static_range(1, QUERIES):
        last = tl.maximum(last, tl.load(query_positions + row * QUERIES + query))
    begin = number * chunk
    end = tl.minimum(begin + chunk, bound)
    if key_positions is None:
        end = tl.minimum(end, last + 1).to(tl.int32)
    found = 0
    into = slots + own * bound + begin
    for start in range(begin, end, STEP):
        place = start + tl.arange(0, STEP)
        inside = place < end
        if key_positions is None:
            j = place
        else:
            j = tl.load(key_positions + row * positions_row + place, mask=inside, other=-1).to(tl.int32)
        if BLOCK > 0:
            block = tl.load(block_table + row * table_row + place // BLOCK, mask=inside, other=0)
            at = block.to(tl.int64) * groups_row + place % BLOCK * groups_place
            slot = block * BLOCK + place % BLOCK if QUERIES == 1 else place
        else:
            at = row * groups_row + place * groups_place
            slot = place
        group = tl.load(key_groups + at + head * groups_head, mask=inside, other=0).to(tl.int32)
        some = tl.zeros((STEP,), tl.int1)
        for query in tl.static_range(QUERIES):
            i = tl.load(query_positions + row * QUERIES + query).to(tl.int32)
            table = reads + (own * QUERIES + query) * GROUPS * BANDS
            some = some | attended(table, group, i, j, BANDS, WINDOW, SINKS, DENSE, inside)
        rank = tl.cumsum(some.to(tl.int32), axis=0)
        tl.store(into + found + rank - 1, slot, mask=some)
        found += tl.sum(some.to(tl.int32), axis=0)
    tl.store(counts + own * tl.num_programs(1) + number, found)
