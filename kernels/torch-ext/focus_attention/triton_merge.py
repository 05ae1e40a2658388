"""What the programs of `triton_gather` found over their parts of a list, merged: the third kernel of decoding.

Nothing here knows the rest of the package: the folder `kernels/` is made from these files.
"""

from __future__ import annotations

import triton
import triton.language as tl


# fmt: off
@triton.jit(do_not_specialize=["splits"])
def merge_parts(  # type: ignore[no-untyped-def]
    partial, lse, sink_logits, output, splits, num_heads,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    PIECE: tl.constexpr, LOG2_E: tl.constexpr, LOWEST: tl.constexpr,
):
    own = tl.program_id(0)
    head, which = own // QUERIES % num_heads, own % QUERIES
    of_key_head = own // QUERIES // HEADS  # sequences and key heads
    first = of_key_head.to(tl.int64) * splits * HEADS * QUERIES + head % HEADS * QUERIES + which
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
