"""A CUDA backend without a GPU: asked as the device's would be, and answered in plain torch."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..attention.kernels import Call, Reference, Result
from ..attention.kernels.flash import TorchFlash
from ..attention.rows import Rows


class FlashStandIn(TorchFlash):
    """``torch-flash`` for tensors of any device, fake ones among them: one operation for each kernel launch.

    What surrounds the launch (gathers, plans, merges, layouts) is what CUDA runs. For counting and tests, inference
    only.
    """

    name: ClassVar[str] = "torch-flash"

    def missing(self) -> str | None:
        return None

    def unsupported(self, query: Tensor, value: Tensor) -> str | None:
        return None

    def _varlen_forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, window: tuple[int, int]) -> Result:
        rows = call.rows
        output, lse = _varlen(
            q, k, v, rows.cu_queries, rows.cu_keys, rows.longest_query, rows.longest_key, call.scale, *window
        )
        return output, lse


@torch.library.custom_op("focus_hf::varlen_stand_in", mutates_args=())
def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    longest_query: int,
    longest_key: int,
    scale: float,
    left: int,
    right: int,
) -> tuple[Tensor, Tensor]:
    """Attention over ragged rows by their offsets on the device, as flash kernels take them.

    Rows without keys or without queries, and tokens behind the last offset, are left alone, as kernels do it.
    """
    output = torch.full_like(query, float("nan"))
    lse = query.new_full((query.shape[1], query.shape[0]), float("nan"), dtype=_lse_dtype(query))
    q_offsets, k_offsets = cu_queries.tolist(), cu_keys.tolist()
    for row in range(len(q_offsets) - 1):
        q, k = slice(*q_offsets[row : row + 2]), slice(*k_offsets[row : row + 2])
        queries, keys = q.stop - q.start, k.stop - k.start
        if queries > longest_query or keys > longest_key:
            raise ValueError(
                f"row {row} has {queries} queries and {keys} keys, more than {longest_query, longest_key}"
            )
        if queries and keys:
            window = None if left < 0 else left
            call = Call(Rows.single(queries, keys, query.device), scale, window, causal=right == 0)
            output[q], log = Reference().forward(query[q], key[k], value[k], call)
            lse[:, q] = log.T.to(lse.dtype)
        elif queries:  # without a key
            output[q], lse[:, q] = 0.0, float("-inf")
    return output, lse


@_varlen.register_fake
def _(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[1], query.shape[0], dtype=_lse_dtype(query))


def _lse_dtype(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)
