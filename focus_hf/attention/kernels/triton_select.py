"""Which keys the newest tokens attend to, as short lists on the device, and what programs found over parts of them,
merged: the first and the third kernel of decoding. `triton_gather` has the second, and launches all.

Nothing here knows the rest of the package: `kernels/build.py` makes a repository of these files.
"""

from __future__ import annotations

import triton
import triton.language as tl


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


# fmt: off
@triton.jit(do_not_specialize=["bound", "chunk", "groups_row", "groups_head", "positions_row", "table_row"])
def select_keys(  # type: ignore[no-untyped-def]
    key_groups, reads, query_positions, key_positions, block_table, slots, counts, bound, chunk, choosers,
    groups_row, groups_head, groups_place, positions_row, table_row,
    QUERIES: tl.constexpr, GROUPS: tl.constexpr, BANDS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    DENSE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, OF_KEY_HEAD: tl.constexpr,
):
    """List the keys that at least one query of a sequence attends to, for each chooser.

    A chooser's list has ``bound`` places in chunks: a chunk's entries are at its beginning, in ascending order, and
    ``counts`` says how many. Of one query with a block table an entry is already ``block * block size + place in the
    block``, otherwise a place of the sequence.
    """
    own, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, head = own // choosers, own % choosers // OF_KEY_HEAD
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


@triton.jit(do_not_specialize=["splits"])
def merge_parts(  # type: ignore[no-untyped-def]
    partial, lse, sink_logits, output, splits, num_heads,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    PIECE: tl.constexpr, LOG2_E: tl.constexpr, LOWEST: tl.constexpr,
):
    own = tl.program_id(0)
    head, which = own // QUERIES % num_heads, own % QUERIES
    of_chooser = own // QUERIES // HEADS  # sequences and choosers
    first = of_chooser.to(tl.int64) * splits * HEADS * QUERIES + head % HEADS * QUERIES + which
    dim = tl.arange(0, VALUE_WIDTH)
    peak, total = LOWEST, 0.0
    if sink_logits is not None:
        peak, total = tl.load(sink_logits + head).to(tl.float32) * LOG2_E, 1.0
    weighted = tl.zeros((VALUE_WIDTH,), tl.float32)
    for start in range(0, splits, PIECE):
        split = start + tl.arange(0, PIECE)
        into = first + split * HEADS * QUERIES
        some = split < splits
        log = tl.load(lse + into, mask=some, other=LOWEST)
        higher = tl.maximum(peak, tl.max(log, axis=0))
        weight = tl.where(log > LOWEST, tl.exp2(log - higher), 0.0)
        part = tl.load(
            partial + into[:, None] * VALUE_DIM + dim[None, :],
            mask=some[:, None] & (dim < VALUE_DIM)[None, :],
            other=0.0,
        )
        fade = tl.exp2(peak - higher)
        total = total * fade + tl.sum(weight, axis=0)
        weighted = weighted * fade + tl.sum(part * weight[:, None], axis=0)
        peak = higher
    weighted = weighted / tl.where(total > 0, total, 1.0)
    tl.store(output + own * VALUE_DIM + dim, weighted.to(output.dtype.element_ty), mask=dim < VALUE_DIM)
# fmt: on
