"""Which cells queries read, in one launch: what `routing.cells.cell_reads` says, with no score of a cell in memory.

Of a prompt the scores of all cells would be the largest tensor of a layer, several times over. Nothing here knows the
rest of the package: the folder `kernels/` is made from these files.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Queries of a program.
QUERIES = 32

WARPS = 4


def cell_reads(
    queries: Tensor,
    positions: Tensor,
    query_projection: Tensor,
    centroids: Tensor,
    band_projection: Tensor,
    cell_bias: Tensor,
    offset: Tensor,
    threshold: float,
    local_window: int,
) -> Tensor:
    """The cells that queries read; the tensors of a router are those of `routing.cells.CellRouter`, float32.

    Args:
        queries: after rotary positions, ``(B, H, Q, D)``, the last dimension contiguous.
        positions: of the queries, integers ``(B, Q)``.
        query_projection: ``(H_kv, d_g, r * D)``.
        centroids: ``(H_kv, K, d_g)``.
        band_projection: ``(H_kv, bands + 1, r * D)``, of "near" last.
        cell_bias: ``(H_kv, K * bands + 1)``, likewise.
        offset: added to the threshold of each head, ``(H_kv,)``.
        threshold: the dial; lower reads more.
        local_window: ``w``.

    Returns:
        bool ``(B, H_kv, Q, K, bands)``.
    """
    batch, num_heads, length, head_dim = queries.shape
    kv_heads, groups, codes = centroids.shape
    bands = band_projection.shape[1] - 1
    reads = torch.empty(batch, kv_heads, length, groups, bands, dtype=torch.bool, device=queries.device)
    router = (x.contiguous() for x in (query_projection, centroids, band_projection, cell_bias, offset))
    _reads[(triton.cdiv(length, QUERIES), batch * kv_heads)](
        *(queries, positions.contiguous(), *router, reads.view(torch.uint8), threshold, length),
        *queries.stride()[:3],
        KV_HEADS=kv_heads,
        HEADS=num_heads // kv_heads,
        HEAD_DIM=head_dim,
        WIDTH=max(16, triton.next_power_of_2(head_dim)),
        CODES=codes,
        CODES_WIDTH=max(16, triton.next_power_of_2(codes)),
        GROUPS=groups,
        GROUPS_WIDTH=max(16, triton.next_power_of_2(groups)),
        BANDS=bands,
        BANDS_WIDTH=max(16, triton.next_power_of_2(bands + 1)),
        FIRST=max(local_window, 1),
        QUERIES=QUERIES,
        num_warps=WARPS,
    )
    return reads


@triton.jit(do_not_specialize=["length"])
def _reads(  # type: ignore[no-untyped-def]  # Triton's types are those of its arguments
    queries,
    positions,
    query_projection,
    centroids,
    band_projection,
    cell_bias,
    offset,
    reads,
    threshold,
    length,
    query_row,
    query_head,
    query_place,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    CODES: tl.constexpr,
    CODES_WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_WIDTH: tl.constexpr,
    BANDS: tl.constexpr,
    BANDS_WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    QUERIES: tl.constexpr,
):
    own = tl.program_id(1)
    row, head = (own // KV_HEADS).to(tl.int64), own % KV_HEADS
    which = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    here = which < length
    dim, code, group = tl.arange(0, WIDTH), tl.arange(0, CODES_WIDTH), tl.arange(0, GROUPS_WIDTH)
    band = tl.arange(0, BANDS_WIDTH)
    wide, coded, grouped = dim < HEAD_DIM, code < CODES, group < GROUPS
    projected = tl.zeros((QUERIES, CODES_WIDTH), tl.float32)
    by_band = tl.zeros((QUERIES, BANDS_WIDTH), tl.float32)
    for number in range(HEADS):
        at = row * query_row + (head * HEADS + number) * query_head + which * query_place
        q = tl.load(queries + at[:, None] + dim[None, :], mask=here[:, None] & wide[None, :], other=0.0)
        q = q.to(tl.float32)
        of_dim = number * HEAD_DIM + dim
        project = tl.load(
            query_projection + (head * CODES + code[None, :]) * HEADS * HEAD_DIM + of_dim[:, None],
            mask=coded[None, :] & wide[:, None],
            other=0.0,
        )
        projected += tl.dot(q, project.to(tl.float32), input_precision="ieee")
        project = tl.load(
            band_projection + (head * (BANDS + 1) + band[None, :]) * HEADS * HEAD_DIM + of_dim[:, None],
            mask=(band <= BANDS)[None, :] & wide[:, None],
            other=0.0,
        )
        by_band += tl.dot(q, project.to(tl.float32), input_precision="ieee")
    center = tl.load(
        centroids + (head * GROUPS + group[None, :]) * CODES + code[:, None],
        mask=grouped[None, :] & coded[:, None],
        other=0.0,
    )
    by_group = tl.dot(projected, center.to(tl.float32), input_precision="ieee")

    bias = cell_bias + head * (GROUPS * BANDS + 1)
    near = tl.sum(tl.where((band == BANDS)[None, :], by_band, 0.0), axis=1)
    peak = near + tl.load(bias + GROUPS * BANDS).to(tl.float32)
    total = tl.full((QUERIES,), 1.0, tl.float32)
    for number in tl.static_range(BANDS):
        cell = by_group + tl.sum(tl.where((band == number)[None, :], by_band, 0.0), axis=1)[:, None]
        cell += tl.load(bias + group * BANDS + number, mask=grouped, other=0.0).to(tl.float32)[None, :]
        cell = tl.where(grouped[None, :], cell, float("-inf"))
        higher = tl.maximum(peak, tl.max(cell, axis=1))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(cell - higher[:, None]), axis=1)
        peak = higher
    total = peak + tl.log(total) + threshold + tl.load(offset + head).to(tl.float32)
    position = tl.load(positions + row * length + which, mask=here, other=0).to(tl.int32)
    into = (own.to(tl.int64) * length + which) * GROUPS * BANDS
    for number in tl.static_range(BANDS):
        cell = by_group + tl.sum(tl.where((band == number)[None, :], by_band, 0.0), axis=1)[:, None]
        cell += tl.load(bias + group * BANDS + number, mask=grouped, other=0.0).to(tl.float32)[None, :]
        size = tl.maximum(position - (FIRST << number), 1)  # positions of the band before a query
        if number < BANDS - 1:
            size = tl.minimum(size, FIRST << number)
        read = cell > (total + tl.log(size.to(tl.float32)))[:, None]
        tl.store(
            reads + into[:, None] + (group * BANDS + number)[None, :],
            read.to(tl.uint8),
            mask=here[:, None] & grouped[None, :],
        )
