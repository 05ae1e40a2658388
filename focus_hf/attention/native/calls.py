"""Routing and attention on a CPU by the library: tensors handed over as addresses."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...routing.cells import CellRouter
from ..definition import WhoAttends, sequences
from ..problem import Problem
from .library import library, missing

_DTYPES = (torch.float32, torch.bfloat16)
_Strides = ctypes.c_int64 * 3


def _fields(pointers: str, strides: str, numbers: str) -> list[tuple[str, type]]:
    return [
        *((name, ctypes.c_void_p) for name in pointers.split()),
        *((f"of_{name}", _Strides) for name in strides.split()),
        *((name, ctypes.c_int64) for name in numbers.split()),
    ]


class _Task(ctypes.Structure):
    """`Task` of attend.cpp."""

    _fields_ = [
        *_fields(
            "query key value groups reads sink_logits output",
            "query key value groups reads output",
            "batch heads kv_heads queries keys dim value_dim cells bands window sinks dense threads narrow",
        ),
        ("scale", ctypes.c_double),
    ]


class _Route(ctypes.Structure):
    """`Route` of route.cpp."""

    _fields_ = _fields(
        "query first second bias offset limits reads",
        "query",
        "of_limits batch kv_heads group queries dim dimensions cells bands threads narrow",
    )


def is_native(*tensors: Tensor) -> bool:
    """Whether the library computes with tensors like these: of a CPU, all float32 or all bfloat16."""
    dtype = tensors[0].dtype
    if dtype not in _DTYPES or torch.compiler.is_compiling():
        return False
    plain = all(type(x) is Tensor and x.device.type == "cpu" and x.dtype == dtype for x in tensors)
    return plain and missing() is None


def fits_native(problem: Problem) -> bool:
    """Whether the library can compute a problem."""
    return (
        problem.is_plain
        and problem.who.key_groups.dtype == torch.uint8
        and is_native(problem.query, problem.key, problem.value)
    )


def native_focus_attention(problem: Problem) -> Tensor:
    """Hard Focus attention: ``(B, H, Q, D_v)``; zeros for padding. It has no gradient."""
    who, query = problem.who, problem.query
    if who.first_position is not None and who.documents is None:
        return _attend(problem, query, problem.key, problem.value, who.key_groups, who.reads, who.first_position)
    output = query.new_zeros(*query.shape[:3], problem.value.shape[-1])
    for row, tokens, queries in sequences(who):
        own, reads = (_some(x[row : row + 1], queries) for x in (query, who.reads))
        keys = (_some(x[row : row + 1], tokens) for x in (problem.key, problem.value, who.key_groups))
        first = int(who.positions[row, tokens][0])
        output[row, :, queries] = _attend(problem, own, *keys, reads, first)[0]
    return output


def _some(tokens: Tensor, index: Tensor | slice) -> Tensor:
    """Those of the third dimension; all of them for a slice."""
    return tokens if isinstance(index, slice) else tokens.index_select(2, index)


def _attend(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, groups: Tensor, reads: Tensor, first: int
) -> Tensor:
    """Of whole documents; see `Problem`, `WhoAttends`, and ``first``: the position of their first token."""
    pattern, sink_logits = problem.who.pattern, problem.scores.sink_logits
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    cells = reads.shape[-2] * reads.shape[-1]
    if reads.stride(-1) != 1 or reads.stride(-2) != reads.shape[-1]:
        reads = reads.contiguous()
    sinks = None if sink_logits is None else sink_logits.float().contiguous()
    output = query.new_empty(*query.shape[:3], value.shape[-1])
    laid_out = {"query": query, "key": key, "value": value, "groups": groups, "reads": reads, "output": output}
    task = _Task(
        **{name: tensor.data_ptr() for name, tensor in laid_out.items()},
        **{f"of_{name}": _Strides(*tensor.stride()[:3]) for name, tensor in laid_out.items()},
        sink_logits=None if sinks is None else sinks.data_ptr(),
        batch=query.shape[0],
        heads=query.shape[1],
        kv_heads=key.shape[1],
        queries=query.shape[2],
        keys=key.shape[2],
        dim=query.shape[3],
        value_dim=value.shape[3],
        cells=cells,
        bands=pattern.num_bands,
        window=pattern.local_window,
        sinks=pattern.sink_tokens - first,
        dense=pattern.dense_below - first,
        threads=torch.get_num_threads(),
        narrow=query.dtype == torch.bfloat16,
        scale=problem.scores.scale,
    )
    library().focus_attend(ctypes.byref(task))
    return output


def cell_reads(queries: Tensor, router: CellRouter, limits: Tensor) -> Tensor:
    """`routing.cells.cell_reads`."""
    (batch, heads, count, dim), (kv_heads, groups, dimensions) = queries.shape, router.centroids.shape
    queries = queries if queries.stride(-1) == 1 else queries.contiguous()
    first, second, bias = router.in_two_steps(torch.float32)
    reads = torch.empty(batch, kv_heads, count, groups, router.num_bands, dtype=torch.bool)
    # Named, so that they live until the call is over.
    turned, offset = first.transpose(1, 2).contiguous(), router.offset.float().contiguous()
    limits = limits.float().contiguous()
    route = _Route(
        query=queries.data_ptr(),
        first=turned.data_ptr(),
        second=second.data_ptr(),
        bias=bias.data_ptr(),
        offset=offset.data_ptr(),
        limits=limits.data_ptr(),
        reads=reads.data_ptr(),
        of_query=_Strides(*queries.stride()[:3]),
        of_limits=limits.stride(0) if limits.shape[0] == batch else 0,
        batch=batch,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        queries=count,
        dim=dim,
        dimensions=dimensions,
        cells=groups * router.num_bands,
        bands=router.num_bands,
        threads=torch.get_num_threads(),
        narrow=queries.dtype == torch.bfloat16,
    )
    library().focus_route(ctypes.byref(route))
    return reads
