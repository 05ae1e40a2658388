"""Routing by cells in two launches: the groups of keys, and the cells that queries read.

What `routing.cells.key_groups` and `routing.cells.cell_reads` say, with no score in memory: those of all cells would
be the largest tensor of a prompt's layer, several times over. Nothing here knows the rest of the package:
`kernels/build.py` makes a repository of these files.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_sizes import width_of

#: Below every score.
LOWEST: tl.constexpr = tl.constexpr(-1e30)

#: Keys or queries of a program, and how much of a head it multiplies at a time.
TOKENS, PIECE = 64, 32

#: Cells that are judged at a time.
CELLS = 64

WARPS, STAGES = 4, 1


def key_groups(keys: Tensor, key_projection: Tensor, centroids: Tensor, balance: Tensor) -> Tensor:
    """The group of each key; the tensors of a router are those of `routing.cells.CellRouter`, float32.

    Args:
        keys: before rotary positions, ``(B, H_kv, S, D)``, the last dimension contiguous.
        key_projection: ``(H_kv, d_g, D)``.
        centroids: ``(H_kv, K, d_g)``.
        balance: ``(H_kv, K)``.

    Returns:
        uint8 ``(B, H_kv, S)``.
    """
    batch, kv_heads, length, head_dim = keys.shape
    groups, codes = centroids.shape[1:]
    found = torch.empty(batch, kv_heads, length, dtype=torch.uint8, device=keys.device)
    router = (x.contiguous() for x in (key_projection, centroids, balance))
    with torch.cuda.device_of(keys):  # Triton launches on the current device
        _groups[(triton.cdiv(length, TOKENS), batch * kv_heads)](
            *(keys, *router, found, length),
            *keys.stride()[:3],
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            PIECE=min(PIECE, width_of(head_dim)),
            CODES=codes,
            CODES_WIDTH=width_of(codes),
            GROUPS=groups,
            GROUPS_WIDTH=width_of(groups),
            TOKENS=TOKENS,
            num_warps=WARPS,
            num_stages=STAGES,
        )
    return found


def cell_reads(
    queries: Tensor, limits: Tensor, first: Tensor, second: Tensor, cell_bias: Tensor, offset: Tensor
) -> Tensor:
    """The cells that queries read; the tensors of a router are those of `routing.cells.CellRouter`, float32.

    Args:
        queries: after rotary positions, ``(B, H, Q, D)``, the last dimension contiguous.
        limits: what the log-share of a cell must be above, float32 ``(B or 1, Q, bands)``.
        first, second, cell_bias: `CellRouter.in_two_steps`, ``(H_c, r * D, n)``, ``(H_c, n, K * bands + 1)`` and
            ``(H_c, 1, K * bands + 1)``, of "near" last.
        offset: added to the limits of each chooser, ``(H_c,)``.

    Returns:
        bool ``(B, H_c, Q, K, bands)``.
    """
    batch, num_heads, length, head_dim = queries.shape
    choosers, scores, bands = first.shape[0], first.shape[2], limits.shape[2]
    cells = second.shape[2] - 1
    reads = torch.empty(batch, choosers, length, cells // bands, bands, dtype=torch.bool, device=queries.device)
    limits = limits.contiguous()
    router = (x.contiguous() for x in (first, second, cell_bias, offset))
    with torch.cuda.device_of(queries):  # Triton launches on the current device
        _reads[(triton.cdiv(length, TOKENS), batch * choosers)](
            *(queries, limits, *router, reads.view(torch.uint8), length),
            limits.stride(0) if limits.shape[0] > 1 else 0,
            *queries.stride()[:3],
            CHOOSERS=choosers,
            HEADS=num_heads // choosers,
            HEAD_DIM=head_dim,
            PIECE=min(PIECE, width_of(head_dim)),
            SCORES=scores,
            SCORES_WIDTH=width_of(scores),
            CELLS=cells,
            SOME=min(CELLS, width_of(cells)),
            BANDS=bands,
            TOKENS=TOKENS,
            num_warps=WARPS,
            num_stages=STAGES,
        )
    return reads


# Products are of float32, on a GPU's matrix units in three parts of each number ("tf32x3"): as near as float32's own.
# fmt: off
@triton.jit(do_not_specialize=["length"])
def _groups(  # type: ignore[no-untyped-def]  # Triton's types are those of its arguments
    keys, key_projection, centroids, balance, found, length, key_row, key_head, key_place,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PIECE: tl.constexpr, CODES: tl.constexpr,
    CODES_WIDTH: tl.constexpr, GROUPS: tl.constexpr, GROUPS_WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):
    own = tl.program_id(1)
    row, head = (own // KV_HEADS).to(tl.int64), own % KV_HEADS
    which = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    code, group = tl.arange(0, CODES_WIDTH), tl.arange(0, GROUPS_WIDTH)
    here, coded, grouped = which < length, code < CODES, group < GROUPS
    at = row * key_row + head * key_head + which.to(tl.int64) * key_place
    projected = tl.zeros((TOKENS, CODES_WIDTH), tl.float32)
    for first in range(0, HEAD_DIM, PIECE):
        dim = first + tl.arange(0, PIECE)
        wide = dim < HEAD_DIM
        k = tl.load(keys + at[:, None] + dim[None, :], mask=here[:, None] & wide[None, :], other=0.0)
        of_code = (head * CODES + code[None, :]) * HEAD_DIM + dim[:, None]
        project = tl.load(key_projection + of_code, mask=wide[:, None] & coded[None, :], other=0.0)
        projected += tl.dot(k.to(tl.float32), project.to(tl.float32), input_precision="tf32x3")
    of_group = (head * GROUPS + group[None, :]) * CODES + code[:, None]
    center = tl.load(centroids + of_group, mask=coded[:, None] & grouped[None, :], other=0.0)
    scores = tl.dot(projected, center.to(tl.float32), input_precision="tf32x3")
    scores += tl.load(balance + head * GROUPS + group, mask=grouped, other=float("-inf")).to(tl.float32)[None, :]
    nearest = tl.argmax(scores, axis=1)
    tl.store(found + own.to(tl.int64) * length + which, nearest.to(tl.uint8), mask=here)


@triton.jit(do_not_specialize=["length", "limits_row"])
def _reads(  # type: ignore[no-untyped-def]
    queries, limits, first, second, cell_bias, offset, reads, length, limits_row, query_row, query_head, query_place,
    CHOOSERS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PIECE: tl.constexpr, SCORES: tl.constexpr,
    SCORES_WIDTH: tl.constexpr, CELLS: tl.constexpr, SOME: tl.constexpr, BANDS: tl.constexpr, TOKENS: tl.constexpr,
):
    own = tl.program_id(1)
    row, head = (own // CHOOSERS).to(tl.int64), own % CHOOSERS
    which = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    here = which < length
    score, some = tl.arange(0, SCORES_WIDTH), tl.arange(0, SOME)
    scored = score < SCORES
    projected = tl.zeros((TOKENS, SCORES_WIDTH), tl.float32)
    PIECES: tl.constexpr = (HEAD_DIM + PIECE - 1) // PIECE
    for number in range(HEADS * PIECES):
        dim = number % PIECES * PIECE + tl.arange(0, PIECE)
        wide = dim < HEAD_DIM
        at = row * query_row + (head * HEADS + number // PIECES) * query_head + which.to(tl.int64) * query_place
        q = tl.load(queries + at[:, None] + dim[None, :], mask=here[:, None] & wide[None, :], other=0.0)
        into = ((head * HEADS + number // PIECES) * HEAD_DIM + dim[:, None]) * SCORES + score[None, :]
        project = tl.load(first + into, mask=wide[:, None] & scored[None, :], other=0.0)
        projected += tl.dot(q.to(tl.float32), project.to(tl.float32), input_precision="tf32x3")

    bias = cell_bias + head * (CELLS + 1)
    of_score = second + (head * SCORES + score[:, None]) * (CELLS + 1)
    peak = tl.full((TOKENS,), LOWEST, tl.float32)
    total = tl.zeros((TOKENS,), tl.float32)
    for start in range(0, CELLS + 1, SOME):  # "near" is the last
        cell = start + some
        matrix = tl.load(of_score + cell[None, :], mask=scored[:, None] & (cell <= CELLS)[None, :], other=0.0)
        found = tl.dot(projected, matrix.to(tl.float32), input_precision="tf32x3")
        found += tl.load(bias + cell, mask=cell <= CELLS, other=float("-inf")).to(tl.float32)[None, :]
        higher = tl.maximum(peak, tl.max(found, axis=1))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(found - higher[:, None]), axis=1)
        peak = higher
    total = peak + tl.log(total) + tl.load(offset + head).to(tl.float32)
    into = (own.to(tl.int64) * length + which) * CELLS

    # In every cell a query's score of its band is added as it is: less the band's limit there, it is so in the sum.
    band = score - (SCORES - 1 - BANDS)
    limit = limits + row * limits_row + which[:, None] * BANDS + band[None, :]
    banded = here[:, None] & (band >= 0)[None, :] & (band < BANDS)[None, :]
    projected -= tl.load(limit, mask=banded, other=0.0)
    for start in range(0, CELLS, SOME):
        cell = start + some
        matrix = tl.load(of_score + cell[None, :], mask=scored[:, None] & (cell < CELLS)[None, :], other=0.0)
        found = tl.dot(projected, matrix.to(tl.float32), input_precision="tf32x3")
        found += tl.load(bias + cell, mask=cell < CELLS, other=0.0).to(tl.float32)[None, :]
        inside = here[:, None] & (cell < CELLS)[None, :]
        tl.store(reads + into[:, None] + cell[None, :], (found > total[:, None]).to(tl.uint8), mask=inside)
# fmt: on
