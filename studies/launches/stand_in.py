"""A CUDA backend without a GPU: asked as the device's would be, and answered in plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from focus_hf.attention.kernels import Call, Gradients, Reference, Result, Rows
from focus_hf.attention.kernels.flash import TorchFlash


class FlashStandIn(TorchFlash):
    """``torch-flash`` for tensors of any device, fake ones among them: one operation for each kernel launch.

    What surrounds the launch (gathers, plans, merges, layouts) is what CUDA runs. For counting and for tests.
    """

    name: ClassVar[str] = "torch-flash"

    def missing(self) -> str | None:
        return None

    def unsupported(self, query: Tensor, value: Tensor) -> str | None:
        return None

    def _varlen_forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, window: tuple[int, int]) -> Result:
        rows = call.rows
        bounds = rows.longest_query, rows.longest_key
        return _varlen(q, k, v, rows.cu_queries, rows.cu_keys, *bounds, call.scale, *window)

    def _varlen_backward(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: Call, window: tuple[int, int]
    ) -> Gradients:
        offsets = call.rows.cu_queries, call.rows.cu_keys
        return _varlen_backward(g, q, k, v, o, lse, *offsets, call.scale, *window)


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
    for q, k in _rows(cu_queries, cu_keys):
        queries, keys = q.stop - q.start, k.stop - k.start
        if queries > longest_query or keys > longest_key:
            most = f"{longest_query} and {longest_key}"
            raise ValueError(f"a row has {queries} queries and {keys} keys, said to be at most {most}")
        if keys:
            call = _call(queries, keys, query, scale, left, right)
            output[q], log = Reference().forward(query[q], key[k], value[k], call)
            lse[:, q] = log.T.to(lse.dtype)
        else:
            output[q], lse[:, q] = 0.0, float("inf")  # as FlashAttention-2 does it
    return output, lse


@_varlen.register_fake
def _(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[1], query.shape[0], dtype=_lse_dtype(query))


@torch.library.custom_op("focus_hf::varlen_stand_in_backward", mutates_args=())
def _varlen_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    scale: float,
    left: int,
    right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Its backward, with output and logsumexp of a larger attention."""
    gradients = [torch.full_like(x, float("nan")) for x in (query, key, value)]
    for total in gradients[1:]:
        total[: int(cu_keys[-1])] = 0.0  # rows without queries
    for q, k in _rows(cu_queries, cu_keys):
        if k.stop > k.start:
            call = _call(q.stop - q.start, k.stop - k.start, query, scale, left, right)
            tensors = grad[q], query[q], key[k], value[k], output[q], lse.T[q]
            gradients[0][q], gradients[1][k], gradients[2][k] = Reference().backward(*tensors, call)
    return gradients[0], gradients[1], gradients[2]


def _rows(cu_queries: Tensor, cu_keys: Tensor) -> Iterator[tuple[slice, slice]]:
    """Queries and keys of the rows that have queries."""
    offsets = itertools.pairwise(zip(cu_queries.tolist(), cu_keys.tolist(), strict=True))
    for (q, k), (q_stop, k_stop) in offsets:
        if q_stop > q:
            yield slice(q, q_stop), slice(k, k_stop)


def _call(queries: int, keys: int, query: Tensor, scale: float, left: int, right: int) -> Call:
    rows = Rows.single(queries, keys, query.device)
    return Call(rows, scale, None if left < 0 else left, causal=right == 0)


def _lse_dtype(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)
