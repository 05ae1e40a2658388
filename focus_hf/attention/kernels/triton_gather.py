"""Attention of the newest tokens over listed keys, gathered from where they stand: the second kernel of decoding.

All query heads that choose together are rows of one tile, so that a key is read once. The list of a chooser is split
over programs, whose results are merged by their logsumexps. Three launches for any batch, the same ones at every step:
lengths are nowhere but on the device, so a CUDA graph can hold them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_select import attended, merge_parts, select_keys
from .triton_sizes import keys_of_decode_tile, num_splits, width_of

#: Below every score: a maximum to begin with that is finite, so that no difference of two is undefined.
LOWEST = -1e30

LOG2_E = 1.4426950408889634

#: Keys that a program looks at in one step, and the most programs that list the keys of one chooser.
STEP, MAX_CHUNKS = 512, 64

WARPS, STAGES = 4, 3


def sparse_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_groups: Tensor,
    reads: Tensor,
    query_positions: Tensor,
    *,
    scale: float,
    local_window: int,
    sink_tokens: int,
    dense_below: int = 0,
    key_positions: Tensor | None = None,
    block_table: Tensor | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Attention of the newest tokens of many sequences over plain, static or paged caches; forward only.

    Query ``i`` attends to key ``j`` as `definition.attended_pairs` says. Keys behind the newest token may be anything:
    a static cache is given whole.

    Args:
        query: ``(B, H, Q, D)``, of few tokens: one, or those of assisted decoding.
        key: ``(B, H_kv, S, D)``; with a block table ``(blocks, H_kv, block size, D)``, which of vLLM's cache is a
            transposed view. Any strides, the last dimension contiguous.
        value: ``(B, H_kv, S, D_v)``, likewise.
        key_groups: uint8, the first three dimensions of the key.
        reads: bool ``(B, H_c, Q, K, bands)``, of ``H_c`` choosers: ``H_kv``, or a multiple of it that divides ``H``.
        query_positions: int32 or int64 ``(B, Q)``; -1 for a query that attends to nothing and gets zeros.
        scale: factor on ``q . k``.
        local_window, sink_tokens, dense_below: see `definition.Pattern`.
        key_positions: ``(B, S)``, -1 for padding and for places that hold nothing; without them a key's place is its
            position.
        block_table: int32 ``(B, most blocks)``: the blocks of each sequence in order. Entries behind its last token
            are not looked at.
        sink_logits: ``(H,)``, learned logits that take part in the softmax and read nothing.

    Returns:
        ``(B, H, Q, D_v)`` in the dtype of the query.

    Raises:
        ValueError: what is given does not fit together.
    """
    check_attention(query, key, value, key_groups, reads)
    if query_positions.shape != (query.shape[0], query.shape[2]):
        raise ValueError(
            f"query_positions must be {(query.shape[0], query.shape[2])}, got {tuple(query_positions.shape)}."
        )
    query_positions, reads = query_positions.contiguous(), reads.contiguous()
    batch, num_heads, queries, head_dim = query.shape
    choosers, value_dim = reads.shape[1], value.shape[3]
    heads, block = num_heads // choosers, 0 if block_table is None else key.shape[2]
    bound = key.shape[2] if block_table is None else block_table.shape[1] * block
    chunk = triton.cdiv(triton.cdiv(bound, MAX_CHUNKS), STEP) * STEP
    chunks, splits = triton.cdiv(bound, chunk), num_splits(batch * choosers, bound)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=key.device)

    slots = empty(batch, choosers, bound, dtype=torch.int32)
    counts = empty(batch, choosers, chunks, dtype=torch.int32)
    partial = empty(batch, choosers, splits, heads * queries, value_dim, dtype=torch.float32)
    lse = empty(batch, choosers, splits, heads * queries, dtype=torch.float32)
    output = empty(batch, num_heads, queries, value_dim, dtype=query.dtype)
    bytes_read = reads.view(torch.uint8)
    rows = (
        0 if key_positions is None else key_positions.stride(0),
        0 if block_table is None else block_table.stride(0),
    )
    pattern = {
        "QUERIES": queries,
        "GROUPS": reads.shape[3],
        "BANDS": reads.shape[4],
        "WINDOW": local_window,
        "SINKS": sink_tokens,
        "DENSE": dense_below,
        "BLOCK": block,
        "OF_KEY_HEAD": choosers // key.shape[1],
    }
    of_values = {"VALUE_DIM": value_dim, "VALUE_WIDTH": width_of(value_dim), "HEADS": heads, "LOWEST": LOWEST}
    with torch.cuda.device_of(query):  # Triton launches on the current device
        select_keys[(batch * choosers, chunks)](
            *(key_groups, bytes_read, query_positions, key_positions, block_table, slots, counts),
            *(bound, chunk, choosers, *key_groups.stride(), *rows),
            STEP=STEP,
            num_warps=WARPS,
            **pattern,
        )
        _gather[(batch * choosers, splits)](
            *(query, key, value, slots, counts, key_groups, bytes_read),
            *(query_positions, key_positions, block_table, partial, lse, scale * LOG2_E),
            *(bound, chunk, chunks, choosers, splits),
            *(*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *key_groups.stride(), *rows),
            HEAD_DIM=head_dim,
            WIDTH=width_of(head_dim),
            ROWS=max(16, triton.next_power_of_2(heads * queries)),
            TILE=keys_of_decode_tile(max(head_dim, value_dim), key.element_size()),
            CHUNKS=MAX_CHUNKS,
            num_warps=WARPS,
            num_stages=STAGES,
            **pattern,
            **of_values,
        )
        merge_parts[(batch * num_heads * queries,)](
            *(partial, lse, sink_logits, output, splits, num_heads),
            QUERIES=queries,
            PIECE=8,
            LOG2_E=LOG2_E,
            num_warps=WARPS,
            **of_values,
        )
    return output


def check_attention(query: Tensor, key: Tensor, value: Tensor, key_groups: Tensor, reads: Tensor) -> None:
    """Refuse what does not fit together, before a kernel reads beyond it."""
    batch, num_heads, queries = query.shape[:3]
    kv_heads, dtype, shape = key.shape[1], key_groups.dtype, tuple(key_groups.shape)
    choosers = reads.shape[1]
    if not choosers or choosers % kv_heads or num_heads % choosers:
        raise ValueError(f"{num_heads} query heads, {choosers} choosers and {kv_heads} key heads do not fit together.")
    if dtype != torch.uint8 or shape != key.shape[:3] or shape != value.shape[:3]:
        raise ValueError(f"key_groups must be uint8 {tuple(key.shape[:3])}, as keys and values, got {dtype} {shape}.")
    dtype, shape = reads.dtype, tuple(reads.shape)
    if dtype != torch.bool or shape[:3] != (batch, choosers, queries) or len(shape) != 5:
        raise ValueError(f"reads must be bool {(batch, choosers, queries)}, groups, bands, got {dtype} {shape}.")
    if reads.stride()[-2:] != (shape[4], 1):
        raise ValueError(f"The groups and bands of reads must be contiguous, strides are {reads.stride()}.")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.stride(-1) != 1:
            raise ValueError(
                f"The last dimension of the {name} must be contiguous: its stride is {tensor.stride(-1)}."
            )


# fmt: off
@triton.jit(
    do_not_specialize=["bound", "chunk", "chunks", "splits", "groups_row", "groups_head", "positions_row", "table_row"]
)
def _gather(  # type: ignore[no-untyped-def]  # Triton's types are those of its arguments
    query, key, value, slots, counts, key_groups, reads, query_positions, key_positions, block_table,
    partial, lse, scale, bound, chunk, chunks, choosers, splits,
    query_row, query_head, query_place, key_row, key_head, key_place, value_row, value_head, value_place,
    groups_row, groups_head, groups_place, positions_row, table_row,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr,
    BANDS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, DENSE: tl.constexpr, BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr, LOWEST: tl.constexpr, OF_KEY_HEAD: tl.constexpr,
):
    own, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, chooser = own // choosers, own % choosers
    head = chooser // OF_KEY_HEAD
    of_row = tl.arange(0, ROWS)
    here, which = of_row < HEADS * QUERIES, of_row % QUERIES
    dim, value_dim = tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
    wide, value_wide = dim < HEAD_DIM, value_dim < VALUE_DIM
    at = row * query_row + (chooser * HEADS + of_row // QUERIES) * query_head + which * query_place
    q = tl.load(query + at[:, None] + dim[None, :], mask=here[:, None] & wide[None, :], other=0.0)
    if QUERIES > 1:  # the list is of all queries together
        i = tl.load(query_positions + row * QUERIES + which, mask=here, other=-1).to(tl.int32)
        table = reads + (own * QUERIES + which) * GROUPS * BANDS

    # The list is in chunks with room behind each: an entry is as much further on as there is room before it.
    of_chunk = tl.arange(0, CHUNKS)
    each = tl.load(counts + own * chunks + of_chunk, mask=of_chunk < chunks, other=0)
    ends, room, number = tl.cumsum(each, axis=0), chunk - each, tl.sum(each, axis=0)
    share = tl.cdiv(number, splits)
    begin = split * share
    end = tl.minimum(begin + share, number)
    peak = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    weighted = tl.zeros((ROWS, VALUE_WIDTH), tl.float32)
    for start in range(begin, end, TILE):
        entry = start + tl.arange(0, TILE)
        inside = entry < end
        skipped = tl.sum(tl.where(ends[None, :] <= entry[:, None], room[None, :], 0), axis=1)
        slot = tl.load(slots + own * bound + entry + skipped, mask=inside, other=0)
        place = slot
        if BLOCK > 0:
            if QUERIES > 1:
                slot = tl.load(block_table + row * table_row + place // BLOCK, mask=inside, other=0) * BLOCK
                slot += place % BLOCK
            block, slot = (slot // BLOCK).to(tl.int64), (slot % BLOCK).to(tl.int64)
        else:
            block, slot = row, slot.to(tl.int64)
        key_at = block * key_row + head * key_head + slot * key_place
        value_at = block * value_row + head * value_head + slot * value_place
        k = tl.load(key + key_at[:, None] + dim[None, :], mask=inside[:, None] & wide[None, :], other=0.0)
        v = tl.load(
            value + value_at[:, None] + value_dim[None, :], mask=inside[:, None] & value_wide[None, :], other=0.0
        )
        seen = inside[None, :]
        if QUERIES > 1:
            group_at = block * groups_row + head * groups_head + slot * groups_place
            group = tl.load(key_groups + group_at, mask=inside, other=0).to(tl.int32)
            if key_positions is None:
                j = place
            else:
                j = tl.load(key_positions + row * positions_row + place, mask=inside, other=-1).to(tl.int32)
            seen = attended(
                table[:, None],
                group[None, :],
                i[:, None],
                j[None, :],
                BANDS,
                WINDOW,
                SINKS,
                DENSE,
                seen & here[:, None],
            )
        scores = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, LOWEST)
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.where(seen, tl.exp2(scores - higher[:, None]), 0.0)
        fade = tl.exp2(peak - higher)
        total = total * fade + tl.sum(weights, axis=1)
        weighted = weighted * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = higher
    some = total > 0
    into = (own * splits + split) * HEADS * QUERIES + of_row
    tl.store(lse + into, tl.where(some, peak + tl.log2(tl.where(some, total, 1.0)), LOWEST), mask=here)
    tl.store(
        partial + into[:, None] * VALUE_DIM + value_dim[None, :],
        weighted / tl.where(some, total, 1.0)[:, None],
        mask=here[:, None] & value_wide[None, :],
    )
# fmt: on
