"""A CUDA backend without a GPU: asked as the device's would be, and answered in plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from ..attention.kernels import Call, Gradients, PagedForward, Pages, Reference, Result
from ..attention.kernels.flash import TorchFlash
from ..attention.merge import merge_splits
from ..attention.rows import Rows


class FlashStandIn(TorchFlash):
    """``torch-flash`` for tensors of any device, fake ones among them: one operation for each kernel launch.

    What surrounds the launch (gathers, plans, merges, layouts) is what CUDA runs. For counting and for tests.
    """

    name: ClassVar[str] = "torch-flash"

    def missing(self) -> str | None:
        return None

    def unsupported(self, query: Tensor, value: Tensor) -> str | None:
        return None

    @property
    def paged(self) -> PagedForward | None:
        return _paged_forward

    def _varlen_forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, window: tuple[int, int]) -> Result:
        rows = call.rows
        bounds = rows.longest_query, rows.longest_key
        return _varlen(q, k, v, rows.cu_queries, rows.cu_keys, *bounds, call.scale, *window)

    def _varlen_backward(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: Call, window: tuple[int, int]
    ) -> Gradients:
        offsets = call.rows.cu_queries, call.rows.cu_keys
        return _varlen_backward(g, q, k, v, o, lse, *offsets, call.scale, *window)


def _paged_forward(query: Tensor, pages: Pages, scale: float) -> Result:
    facts = pages.visible, pages.reads, pages.lengths, pages.tables, pages.places
    return merge_splits(*_paged(query, *pages.recent, *pages.pool, *facts, scale, pages.size))


@torch.library.custom_op("focus_hf::paged_stand_in", mutates_args=())
def _paged(
    query: Tensor,
    recent_key: Tensor,
    recent_value: Tensor,
    pool_key: Tensor,
    pool_value: Tensor,
    visible: Tensor,
    reads: Tensor,
    lengths: Tensor,
    tables: Tensor,
    places: Tensor,
    scale: float,
    size: int,
) -> tuple[Tensor, Tensor]:
    """What `kernels.triton_decode` computes, in two splits: recent slots and lists."""
    dtype = _lse_dtype(query)
    output = query.new_zeros(*query.shape[:2], 2, query.shape[2], dtype=dtype)
    lse = output.new_full(output.shape[:3], float("-inf"))
    for row, place in enumerate(places.tolist()):
        parts = [(recent_key[row, :, 1:][:, visible[row]], recent_value[row, :, 1:][:, visible[row]])]
        if place >= 0:
            slots = _slots_of_lists(reads[place], lengths[place], tables[place], size)
            parts.append((pool_key[place, :, slots], pool_value[place, :, slots]))
        for part, (k, v) in enumerate(parts):
            if k.shape[1]:
                call = Call(Rows.single(1, k.shape[1], query.device), scale, causal=False)
                found = Reference().forward(query[row][None], k.transpose(0, 1), v.transpose(0, 1), call)
                output[row, :, part], lse[row, :, part] = (x[0] for x in found)
    return output, lse


def _slots_of_lists(reads: Tensor, lengths: Tensor, tables: Tensor, size: int) -> Tensor:
    """Where the tokens are of the lists that are read."""
    slots = [lengths.new_zeros(0)]
    for table, length, is_read in zip(tables, lengths.tolist(), reads.tolist(), strict=True):
        at = torch.arange(length if is_read else 0, device=lengths.device)
        slots.append(table[at // size] * size + at % size)
    return torch.cat(slots)


@_paged.register_fake
def _(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    shape = *query.shape[:2], 2
    dtype = _lse_dtype(query)
    return query.new_empty(*shape, query.shape[2], dtype=dtype), query.new_empty(shape, dtype=dtype)


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
