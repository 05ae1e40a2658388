"""One tile of a prompt's attention, the kernel of `triton_prompt`.

A program takes the next tile that nobody has until none is left. It looks at the bytes of all keys before the tile's
last token and writes those that any of its tokens attends to into a short list, each with a bit for every token; then
it reads the keys of the list from where they stand, and the bits are the mask. So nothing is computed for a key that
no token of the tile attends to, and nothing of the size of pairs is ever in memory.

Nothing here knows the rest of the package: `kernels/build.py` makes a repository of these files.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _low(count, TOKENS: tl.constexpr, LIKE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A number whose lowest ``count`` bits are set; at most all of them, ``TOKENS``."""
    count = tl.minimum(tl.maximum(count, 0), TOKENS)
    one = tl.full(count.shape, 1, LIKE)
    half = count // 2  # two shifts: one of all bits of a number is undefined
    return ((one << half) << (count - half)) - 1


# fmt: off
@triton.jit(
    do_not_specialize=[
        *("of_heads", "tiles", "length", "queries", "slots_row", "most", "output_row"),
        *("groups_row", "groups_head", "reads_row", "reads_head"),
    ]
)
def prompt_tile(  # type: ignore[no-untyped-def]  # Triton's types are those of its arguments
    query, key, value, key_groups, reads, key_slots, query_slots, lengths, new, sink_logits, output, lse,
    taken, table, listed, bits, scale, of_heads, tiles, length, queries, slots_row, most,
    query_row, query_head, query_place, key_row, key_head, key_place, value_row, value_head, value_place,
    groups_row, groups_head, groups_place, reads_row, reads_head, reads_place, output_row,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, CELLS: tl.constexpr, PIECE: tl.constexpr,
    BANDS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, DENSE: tl.constexpr, CHOOSERS: tl.constexpr,
    BLOCK: tl.constexpr, ALIKE: tl.constexpr, STEP: tl.constexpr, SEGMENT: tl.constexpr, TILE: tl.constexpr,
    LOG2_E: tl.constexpr, LOWEST: tl.constexpr, OF_KEY_HEAD: tl.constexpr,
):
    LIKE: tl.constexpr = table.dtype.element_ty
    FIRST: tl.constexpr = max(WINDOW, 1)  # where bands begin
    SPAN: tl.constexpr = min(BANDS, 2) if 2 * FIRST >= TOKENS - 1 else BANDS  # bands that a key has in one tile
    program = tl.program_id(0)
    table += program * CELLS
    listed += program * SEGMENT
    bits += program * SEGMENT
    of_row = tl.arange(0, ROWS)
    token, of_head = of_row % TOKENS, of_row // TOKENS
    every = tl.arange(0, TOKENS)
    own_bit = tl.full((ROWS,), 1, LIKE) << token.to(LIKE)
    dim, value_dim = tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
    wide, value_wide = dim < HEAD_DIM, value_dim < VALUE_DIM
    number = tl.atomic_add(taken, 1)
    while number < of_heads * tiles:
        own = number // tiles
        sequence, chooser = (own // CHOOSERS).to(tl.int64), (own % CHOOSERS).to(tl.int64)
        head = chooser // OF_KEY_HEAD
        tile = tiles - 1 - number % tiles  # the longest first
        total, asking = length, queries
        if lengths is not None:
            total, asking = tl.load(lengths + sequence), tl.load(new + sequence)
        count = tl.minimum(asking - tile * TOKENS, TOKENS)
        if count > 0:
            position = total - asking + tile * TOKENS
            place, each = tile * TOKENS + token, tile * TOKENS + every
            here, asked = (of_head < HEADS) & (token < count), every < count
            if query_slots is not None:
                place = tl.load(query_slots + sequence * most + place, mask=here, other=0)
                each = tl.load(query_slots + sequence * most + each, mask=asked, other=0)
            of_query = sequence * query_row + (chooser * HEADS + of_head) * query_head
            of_query += place.to(tl.int64) * query_place
            q = tl.load(query + of_query[:, None] + dim[None, :], mask=here[:, None] & wide[None, :], other=0.0)

            # Of each cell, a bit for every token that reads it.
            tl.debug_barrier()
            of_token = sequence * reads_row + chooser * reads_head + each.to(tl.int64) * reads_place
            for first in range(0, CELLS, PIECE):
                cell = first + tl.arange(0, PIECE)
                read = tl.load(
                    reads + of_token[:, None] + cell[None, :], mask=asked[:, None] & (cell < CELLS)[None, :], other=0
                )
                tl.store(table + cell, tl.sum(read.to(LIKE) << every[:, None].to(LIKE), axis=0), mask=cell < CELLS)

            peak = tl.full((ROWS,), LOWEST, tl.float32)
            norm = tl.zeros((ROWS,), tl.float32)
            weighted = tl.zeros((ROWS, VALUE_WIDTH), tl.float32)
            end = position + count
            for segment in range(0, end, SEGMENT):
                stop = tl.minimum(segment + SEGMENT, end)
                found = 0
                tl.debug_barrier()  # the table is written, and the list read
                for start in range(segment, stop, STEP):
                    j = start + tl.arange(0, STEP)
                    inside = j < stop
                    slot = j
                    if key_slots is not None:
                        slot = tl.load(key_slots + sequence * slots_row + j, mask=inside, other=0)
                    block, at = sequence, slot.to(tl.int64)
                    if BLOCK > 0:
                        block, at = (slot // BLOCK).to(tl.int64), slot % BLOCK
                    at = block * groups_row + head * groups_head + at * groups_place
                    group = tl.load(key_groups + at, mask=inside, other=0).to(tl.int32)
                    far_off = (
                        (position - start - STEP >= FIRST << (BANDS - 1)) & (start >= SINKS) & (position >= DENSE)
                    )
                    if far_off:  # all of them in the last band of every token
                        attend = tl.load(table + group * BANDS + BANDS - 1, mask=inside, other=0)
                    else:
                        # Tokens of one kind are neighbours: bits of a key are between two numbers of tokens.
                        distance = position - j  # of the first token; one more for each later one
                        attend = _low(WINDOW + 1 - distance, TOKENS, LIKE)
                        attend |= tl.where(j < SINKS, _low(tl.full((STEP,), TOKENS, tl.int32), TOKENS, LIKE), 0)
                        if DENSE > 0:
                            attend |= _low(tl.zeros_like(j) + (DENSE - position), TOKENS, LIKE)
                        band = tl.zeros((STEP,), tl.int32)
                        for edge in tl.static_range(1, BANDS):
                            band += (distance > (FIRST << edge)).to(tl.int32)
                        for _ in tl.static_range(SPAN):
                            until = tl.where(band < BANDS - 1, (FIRST << (band + 1)) + 1 - distance, TOKENS)
                            after = tl.where(band > 0, (FIRST << band) + 1 - distance, 0)
                            in_band = _low(until, TOKENS, LIKE) & ~_low(after, TOKENS, LIKE)
                            cell = group * BANDS + band
                            attend |= in_band & tl.load(table + cell, mask=inside & (band < BANDS), other=0)
                            band += 1
                        attend &= ~_low(-distance, TOKENS, LIKE)
                        attend &= _low(tl.zeros_like(j) + count, TOKENS, LIKE)
                    some = inside & (attend != 0)
                    rank = found + tl.cumsum(some.to(tl.int32), axis=0) - 1
                    tl.store(listed + rank, slot, mask=some)
                    tl.store(bits + rank, attend, mask=some)
                    found += tl.sum(some.to(tl.int32), axis=0)
                tl.debug_barrier()
                for start in range(0, found, TILE):
                    entry = start + tl.arange(0, TILE)
                    inside = entry < found
                    slot = tl.load(listed + entry, mask=inside, other=0)
                    attend = tl.load(bits + entry, mask=inside, other=0)
                    block, at = sequence, slot.to(tl.int64)
                    if BLOCK > 0:
                        block, at = (slot // BLOCK).to(tl.int64), (slot % BLOCK).to(tl.int64)
                    of_key = block * key_row + head * key_head + at * key_place
                    of_value = of_key
                    if not ALIKE:
                        of_value = block * value_row + head * value_head + at * value_place
                    k = tl.load(key + of_key[:, None] + dim[None, :], mask=inside[:, None] & wide[None, :], other=0.0)
                    v = tl.load(
                        value + of_value[:, None] + value_dim[None, :],
                        mask=inside[:, None] & value_wide[None, :],
                        other=0.0,
                    )
                    seen = (attend[None, :] & own_bit[:, None]) != 0
                    # What is not seen is so far below the first maximum that its weight is 0.
                    scores = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee"), 2 * LOWEST)
                    higher = tl.maximum(peak, tl.max(scores, axis=1))
                    weights = tl.exp2(scores * scale - (higher * scale)[:, None])
                    fade = tl.exp2((peak - higher) * scale)
                    norm = norm * fade + tl.sum(weights, axis=1)
                    weighted = weighted * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
                    peak = higher

            peak *= scale
            if sink_logits is not None:
                logit = tl.load(sink_logits + chooser * HEADS + of_head, mask=here, other=0).to(tl.float32) * LOG2_E
                higher = tl.maximum(peak, logit)
                fade = tl.exp2(peak - higher)
                norm = norm * fade + tl.exp2(logit - higher)
                weighted, peak = weighted * fade[:, None], higher
            some = norm > 0
            norm = tl.where(some, norm, 1.0)
            into = sequence * output_row + (chooser * HEADS + of_head) * queries + place
            tl.store(lse + into, tl.where(some, (peak + tl.log2(norm)) / LOG2_E, float("-inf")), mask=here)
            tl.store(
                output + into[:, None] * VALUE_DIM + value_dim[None, :],
                (weighted / norm[:, None]).to(output.dtype.element_ty),
                mask=here[:, None] & value_wide[None, :],
            )
        number = tl.atomic_add(taken, 1)
# fmt: on
