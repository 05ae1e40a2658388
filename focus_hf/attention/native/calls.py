"""Routing and attention on a CPU by the library: tensors handed over as addresses."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from ...routing.cells import CellRouter
from ..definition import PADDING, Pattern, sequences
from ..problem import Problem, Scores
from .library import library, missing

_DTYPES = (torch.float32, torch.bfloat16)

#: `Task` of attend.cpp, `Route` of route.cpp: addresses, strides, numbers.
_TASK, _ROUTE = struct.Struct("9P18q17qd"), struct.Struct("8P4q10q")


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
    if who.documents is None:
        edges = None if who.first_position is not None else _padded_left(who.positions)
        if edges is not None or who.first_position is not None:
            tensors = query, problem.key, problem.value, who.key_groups, who.reads
            return attend(tensors, who.pattern, problem.scores, who.first_position or 0, edges)
    output = query.new_zeros(*query.shape[:3], problem.value.shape[-1])
    for row, some_tokens, some_queries in sequences(who):
        tokens, queries = _next_to_each_other(some_tokens), _next_to_each_other(some_queries)
        own, reads = (x[row : row + 1, :, queries] for x in (query, who.reads))
        key, value, groups = (x[row : row + 1, :, tokens] for x in (problem.key, problem.value, who.key_groups))
        first = int(who.positions[row, tokens][0])
        output[row, :, queries] = attend((own, key, value, groups, reads), who.pattern, problem.scores, first)[0]
    return output


def _padded_left(positions: Tensor) -> Tensor | None:
    """Where sequences begin and end, int64 ``(B, 2)``, if each stands at the right of its row, from position 0 on."""
    length, positions = positions.shape[1], positions.long()
    first = (length - 1 - positions[:, -1:]).clamp(min=0)
    if not torch.equal(positions, (torch.arange(length) - first).clamp(min=PADDING)):
        return None
    return torch.cat([first, torch.full_like(first, length)], dim=1)


def _next_to_each_other(index: Tensor | slice) -> Tensor | slice:
    """As a slice where it can be one: nothing is copied then."""
    if isinstance(index, slice):
        return index
    first, last = int(index[0]), int(index[-1])
    return slice(first, last + 1) if last - first + 1 == index.shape[0] else index


def attend(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    pattern: Pattern,
    scores: Scores,
    first: int = 0,
    edges: Tensor | None = None,
    table: Tensor | None = None,
) -> Tensor:
    """Hard Focus attention of whole sequences: ``(B, H, Q, D_v)``.

    Args:
        tensors: query, key, value, key groups and reads, see `Problem`, or for blocks `on_device.decode_in_place`.
        pattern: window, sinks, dense start.
        scores: how they are made, plain.
        first: the position of each sequence's first token.
        edges: int64 ``(B, 2)``, of each sequence its first key and the one behind its newest; all without.
        table: int32 ``(B, most blocks)``, contiguous: the blocks that the keys of one new token each are in.
    """
    query, key, value, groups, reads = tensors
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    # Nothing below checks an address: these fit, or raise.
    value = value.expand(*key.shape[:3], -1)
    groups = groups.expand(*key.shape[:3])
    kv_heads, choosers = key.shape[1], max(key.shape[1], reads.shape[1])
    reads = reads.expand(query.shape[0], choosers, query.shape[2], -1, pattern.num_bands)
    if choosers % kv_heads or query.shape[1] % choosers:
        raise ValueError(f"{query.shape[1]} query heads, {choosers} that choose and {kv_heads} of keys do not fit.")
    cells = reads.shape[-2] * reads.shape[-1]
    if reads.stride(-1) != 1 or reads.stride(-2) != reads.shape[-1]:
        reads = reads.contiguous()
    sinks = None if scores.sink_logits is None else scores.sink_logits.float().contiguous()
    output = query.new_empty(*query.shape[:3], value.shape[-1])
    laid_out = (query, key, value, groups, reads, output)
    keys = key.shape[2] * (1 if table is None else table.shape[1])
    task = _TASK.pack(
        *(tensor.data_ptr() for tensor in laid_out[:5]),
        *(0 if tensor is None else tensor.data_ptr() for tensor in (sinks, edges, table)),
        output.data_ptr(),
        *(stride for tensor in laid_out for stride in tensor.stride()[:3]),
        *(*query.shape[:2], choosers, choosers // kv_heads, query.shape[2], keys, key.shape[3], value.shape[3], cells),
        *(pattern.num_bands, pattern.local_window, pattern.sink_tokens - first, pattern.dense_below - first),
        *(
            torch.get_num_threads(),
            query.dtype == torch.bfloat16,
            key.shape[2],
            0 if table is None else table.stride(0),
        ),
        scores.scale,
    )
    library().focus_attend(task)
    return output


def cell_reads(queries: Tensor, router: CellRouter, limits: Tensor) -> Tensor:
    """`routing.cells.cell_reads`."""
    (batch, heads, count, dim), (_, groups, dimensions) = queries.shape, router.centroids.shape
    choosers = router.offset.shape[0]
    queries = queries if queries.stride(-1) == 1 else queries.contiguous()
    tensors, bands, limits = _laid_out(router), router.num_bands, limits.contiguous()
    reads = torch.empty(batch, choosers, count, groups, bands, dtype=torch.bool)
    task = _ROUTE.pack(
        *(tensor.data_ptr() for tensor in (*tensors, queries, limits, reads)),
        *(*queries.stride()[:3], limits.stride(0) if limits.shape[0] > 1 else 0),
        *(batch, choosers, heads // choosers, count, dim, dimensions, groups, bands),
        *(torch.get_num_threads(), queries.dtype == torch.bfloat16),
    )
    library().focus_route(task)
    return reads


def _laid_out(router: CellRouter) -> list[Tensor]:
    """The tensors of a router as route.cpp wants them, in its order; made once."""
    kept: list[Tensor] | None = vars(router).get("_laid_out")
    if kept is None:
        with torch.inference_mode(False), torch.no_grad():
            first, groups = router.in_two_steps(torch.float32)[0].transpose(1, 2), router.centroids.shape[1]
            bias = router.cell_bias[:, :-1].unflatten(1, (groups, -1)).transpose(1, 2)
            centroids = router.centroids_of_choosers().transpose(1, 2)
            of_heads = first, centroids, bias, router.cell_bias[:, -1], router.offset
            kept = vars(router)["_laid_out"] = [tensor.float().contiguous() for tensor in of_heads]
    return kept
