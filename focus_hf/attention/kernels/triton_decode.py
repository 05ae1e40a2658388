"""A Triton kernel of decoding: one query of each row reads recent slots and whole lists, by their tables of pages.

Import it only where Triton is installed (`base.triton_missing`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..merge import merge_splits
from .base import Pages

#: Below every score: a maximum to begin with that is finite, so that no difference of two is undefined.
_LOWEST = -1e30

#: Programs that share the keys of one key head: enough to fill a GPU with few sequences, few enough to merge.
SPLITS = 32

WARPS = 4


def keys_of_tile(width: int) -> int:
    """Keys that are read at a time, of so many numbers: few enough that nothing is spilled; a page may have fewer."""
    return max(16, min(64, 4096 // width))


def paged_forward(query: Tensor, pages: Pages, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of one query of each row over recent tokens and lists of a pool (`base.PagedForward`); forward only.

    Args:
        query: ``(R, H, D)``.
        pages: what is read.
        scale: factor on ``q . k``.

    Returns:
        Float32 output ``(R, H, D)`` and logsumexp ``(R, H)``.
    """
    rows, num_heads, head_dim = query.shape
    kv_heads, recent = pages.recent[0].shape[1:3]
    query, visible, reads = query.contiguous(), pages.visible.contiguous(), pages.reads.contiguous()
    output = query.new_empty(rows, num_heads, SPLITS, head_dim, dtype=torch.float32)
    lse = query.new_empty(rows, num_heads, SPLITS, dtype=torch.float32)
    width = max(16, triton.next_power_of_2(head_dim))
    _paged[(rows * kv_heads, SPLITS)](
        *(query, *pages.recent, *pages.pool, output, lse, visible, reads, pages.lengths, pages.tables, pages.places),
        *(scale, kv_heads, recent, pages.pool[0].shape[2], reads.shape[1], pages.tables.shape[2]),
        HEADS=num_heads // kv_heads,
        ROWS=max(16, triton.next_power_of_2(num_heads // kv_heads)),
        HEAD_DIM=head_dim,
        WIDTH=width,
        PAGE=pages.size,
        TILE=keys_of_tile(width),
        SPLITS=SPLITS,
        LOWEST=_LOWEST,
        num_warps=WARPS,
    )
    return merge_splits(output, lse)


@triton.jit
def _attend(  # type: ignore[no-untyped-def]  # Triton's types are those of its arguments
    q, peak, total, weighted, key, value, slot, seen, dim, wide, scale, HEAD_DIM: tl.constexpr, LOWEST: tl.constexpr
):
    """One tile more: its keys that are ``seen``, into running maximum, sum and weighted values."""
    k = tl.load(key + slot[None, :] * HEAD_DIM + dim[:, None], mask=seen[None, :] & wide[:, None], other=0.0)
    v = tl.load(value + slot[:, None] * HEAD_DIM + dim[None, :], mask=seen[:, None] & wide[None, :], other=0.0)
    scores = tl.where(seen[None, :], tl.dot(q, k, input_precision="ieee") * scale, LOWEST)
    higher = tl.maximum(peak, tl.max(scores, axis=1))
    weights = tl.where(seen[None, :], tl.exp(scores - higher[:, None]), 0.0)
    fade = tl.exp(peak - higher)
    total = total * fade + tl.sum(weights, axis=1)
    weighted = weighted * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return higher, total, weighted


@triton.jit
def _paged(  # type: ignore[no-untyped-def]
    query,
    recent_key,
    recent_value,
    pool_key,
    pool_value,
    output,
    lse,
    visible,
    reads,
    lengths,
    tables,
    places,
    scale,
    kv_heads,
    recent,
    slots,
    num_lists,
    width,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    LOWEST: tl.constexpr,
):
    # The query heads of one key head are the rows of a tile. Tiles of keys are dealt out to the splits in turn.
    own, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = own // kv_heads
    head, dim, place = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, TILE)
    here, wide = head < HEADS, dim < HEAD_DIM
    first = (own * HEADS + head).to(tl.int64)
    tile = here[:, None] & wide[None, :]
    q = tl.load(query + first[:, None] * HEAD_DIM + dim[None, :], mask=tile, other=0.0)
    peak = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    weighted = tl.zeros((ROWS, WIDTH), tl.float32)
    key = recent_key + own * recent * HEAD_DIM
    value = recent_value + own * recent * HEAD_DIM
    for start in range(1 + split * TILE, recent, SPLITS * TILE):
        slot = start + place
        seen = tl.load(visible + row * (recent - 1) + slot - 1, mask=slot < recent, other=0) != 0
        peak, total, weighted = _attend(
            q, peak, total, weighted, key, value, slot, seen, dim, wide, scale, HEAD_DIM, LOWEST
        )
    with_lists = tl.load(places + row)
    if with_lists >= 0:
        key = pool_key + (with_lists * kv_heads + own % kv_heads) * slots * HEAD_DIM
        value = pool_value + (with_lists * kv_heads + own % kv_heads) * slots * HEAD_DIM
        for number in range(num_lists):
            listed = with_lists * num_lists + number
            if tl.load(reads + listed) != 0:
                length = tl.load(lengths + listed)
                for tile_start in range((split + number) % SPLITS * TILE, length, SPLITS * TILE):
                    at = tile_start + place
                    inside = at < length
                    page = tl.load(tables + listed * width + at // PAGE, mask=inside, other=0)
                    into_pool = page * PAGE + at % PAGE
                    peak, total, weighted = _attend(
                        q, peak, total, weighted, key, value, into_pool, inside, dim, wide, scale, HEAD_DIM, LOWEST
                    )
    some = total > 0
    weighted = weighted / tl.where(some, total, 1.0)[:, None]
    log = tl.where(some, peak + tl.log(tl.where(some, total, 1.0)), float("-inf"))
    into = first * SPLITS + split
    tl.store(output + into[:, None] * HEAD_DIM + dim[None, :], weighted, mask=tile)
    tl.store(lse + into, log, mask=here)
