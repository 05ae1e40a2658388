"""A Triton kernel for what no stock kernel takes: queries that each see the first so many keys of a list.

Import it only where Triton is installed (`base.triton_missing`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Queries handled by one program; the rows of `lookup_forward` are cut into blocks of this many.
BLOCK_QUERIES = 64

#: Keys that it reads at a time, and warps that do it: so that nothing is spilled at heads of 128.
BLOCK_KEYS, WARPS = 32, 8

#: Below every score: a maximum to begin with that is finite, so that no difference of two is undefined.
_LOWEST = -1e30


def lookup_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    asking: Tensor,
    limits: Tensor,
    keys: Tensor,
    blocks: tuple[Tensor, Tensor, Tensor],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention of readers over prefixes of lists of keys; forward only.

    Args:
        query: ``(Tq, H, D)``.
        key: ``(Tk, H_kv, D)``, with the last dimension contiguous, as of the others.
        value: ``(Tk, H_kv, D)``.
        asking: ``(N,)``, which query each reader is.
        limits: ``(N,)``, how many of its list's first keys it sees; ascending within a list.
        keys: ``(M,)``, the lists, one after the other: which key stands at each place.
        blocks: for each block of readers, ``(P,)`` each: its first reader, the end of its list's readers, where the
            list begins. A block whose first reader is behind the end is empty.
        scale: factor on ``q . k``.

    Returns:
        Output ``(N, H, D)`` in the dtype of the query and float32 logsumexp ``(N, H)``, ``-inf`` for a reader that
        sees nothing. Readers in no block get anything.
    """
    num_readers, num_heads, head_dim = asking.shape[0], query.shape[1], query.shape[2]
    output = query.new_empty(num_readers, num_heads, head_dim)
    lse = torch.empty(num_readers, num_heads, dtype=torch.float32, device=query.device)
    _lookup[(blocks[0].shape[0], num_heads)](
        *(query, key, value, output, lse, asking, limits, keys, *blocks, scale),
        *(query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1)),
        *(num_heads, num_heads // key.shape[1]),
        HEAD_DIM=head_dim,
        WIDTH=max(16, triton.next_power_of_2(head_dim)),
        QUERIES=BLOCK_QUERIES,
        KEYS=BLOCK_KEYS,
        LOWEST=_LOWEST,
        num_warps=WARPS,
    )
    return output, lse


@triton.jit
def _lookup(  # type: ignore[no-untyped-def]  # Triton's types are those of its arguments
    query,
    key,
    value,
    output,
    lse,
    asking,
    limits,
    keys,
    block_first,
    block_stop,
    block_list,
    scale,
    query_token,
    query_head,
    key_token,
    key_head,
    value_token,
    value_head,
    num_heads,
    heads_per_key,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    LOWEST: tl.constexpr,
):
    block, head = tl.program_id(0), tl.program_id(1)
    first, stop = tl.load(block_first + block), tl.load(block_stop + block)
    if first >= stop:
        return
    begin = tl.load(block_list + block)
    reader = first + tl.arange(0, QUERIES)
    inside = reader < stop
    sees = tl.load(limits + reader, mask=inside, other=0)
    most = tl.max(sees, axis=0)
    dim = tl.arange(0, WIDTH)
    wide = dim < HEAD_DIM

    token = tl.load(asking + reader, mask=inside, other=0)
    places = token[:, None] * query_token + head * query_head + dim[None, :]
    q = tl.load(query + places, mask=inside[:, None] & wide[None, :], other=0.0)
    peak = tl.full((QUERIES,), LOWEST, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    weighted = tl.zeros((QUERIES, WIDTH), tl.float32)
    of_key = head // heads_per_key
    for start in range(0, most, KEYS):
        place = start + tl.arange(0, KEYS)
        seen = place < most
        index = tl.load(keys + begin + place, mask=seen, other=0)
        k = tl.load(
            key + index[None, :] * key_token + of_key * key_head + dim[:, None],
            mask=seen[None, :] & wide[:, None],
            other=0.0,
        )
        v = tl.load(
            value + index[:, None] * value_token + of_key * value_head + dim[None, :],
            mask=seen[:, None] & wide[None, :],
            other=0.0,
        )
        allowed = place[None, :] < sees[:, None]
        scores = tl.where(allowed, tl.dot(q, k, input_precision="ieee") * scale, LOWEST)
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.where(allowed, tl.exp(scores - higher[:, None]), 0.0)
        fade = tl.exp(peak - higher)
        total = total * fade + tl.sum(weights, axis=1)
        weighted = weighted * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = higher
    some = sees > 0
    weighted = weighted / tl.where(some, total, 1.0)[:, None]
    log = tl.where(some, peak + tl.log(tl.where(some, total, 1.0)), float("-inf"))
    into = reader[:, None] * num_heads * HEAD_DIM + head * HEAD_DIM + dim[None, :]
    tl.store(output + into, weighted.to(output.dtype.element_ty), mask=inside[:, None] & wide[None, :])
    tl.store(lse + reader * num_heads + head, log, mask=inside)
