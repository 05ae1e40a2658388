"""Routing, and attention on a GPU, by kernels of ours, which read keys where they stand, by groups and what is read.

Nothing is read back from the device. Inference; with Triton.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..routing import cells
from ..routing.cells import CellRouter
from . import native
from .kernels import triton_missing
from .problem import Problem

#: So many new tokens are few: each has a list of its keys. More are a prompt, in tiles.
FEW_QUERIES = 8


def fits_device(problem: Problem) -> bool:
    """Whether the kernels can compute a problem: a plain one, of whole rows, each a sequence by itself."""
    who = problem.who
    placed = who.documents is None and (who.first_position in (None, 0)) and who.key_groups.dtype == torch.uint8
    return placed and problem.is_plain and problem.query.device.type == "cuda" and triton_missing() is None


def device_focus_attention(problem: Problem) -> Tensor:
    """Hard Focus attention: ``(B, H, Q, D_v)``; zeros for padding."""
    from .kernels.triton_gather import sparse_decode  # needs Triton
    from .kernels.triton_prompt import PromptTokens, sparse_prompt

    who, scores = problem.who, problem.scores
    numbers: dict[str, Any] = {
        "scale": scores.scale,
        "local_window": who.pattern.local_window,
        "sink_tokens": who.pattern.sink_tokens,
        "dense_below": who.pattern.dense_below,
    }
    tensors = (problem.query, problem.key, problem.value, who.key_groups, who.reads)
    padded, count = who.first_position is None, problem.num_queries
    if count <= FEW_QUERIES:
        return sparse_decode(
            *tensors,
            who.positions[:, -count:],
            key_positions=who.positions if padded else None,
            sink_logits=scores.sink_logits,
            **numbers,
        )
    tokens = PromptTokens.from_positions(who.positions, count) if padded else None
    return sparse_prompt(*tensors, tokens=tokens, sink_logits=scores.sink_logits, **numbers)[0]


def key_groups(keys: Tensor, router: CellRouter) -> Tensor:
    """`routing.cells.key_groups`; of many keys on a GPU in one launch."""
    if not _routes_here(keys):
        return cells.key_groups(keys, router)
    from .kernels import triton_routing

    return triton_routing.key_groups(_rows(keys), router.key_projection, router.centroids, router.balance)


def cell_reads(queries: Tensor, router: CellRouter, limits: Tensor) -> Tensor:
    """`routing.cells.cell_reads`; with no score of a cell in memory on a CPU, and of many queries on a GPU."""
    if native.is_native(queries):
        return native.cell_reads(queries, router, limits)
    if not _routes_here(queries):
        return cells.cell_reads(queries, router, limits)
    from .kernels import triton_routing

    return triton_routing.cell_reads(_rows(queries), limits, *router.in_two_steps(torch.float32), router.offset)


def _routes_here(tensor: Tensor) -> bool:
    """Whether kernels of ours route these tokens ``(B, heads, T, D)``; of few, plain operations are as fast."""
    on_gpu = tensor.device.type == "cuda" and tensor.dtype != torch.float64 and tensor.shape[2] > FEW_QUERIES
    return on_gpu and not torch.compiler.is_compiling() and triton_missing() is None


def _rows(tensor: Tensor) -> Tensor:
    """With a head's numbers next to each other."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
