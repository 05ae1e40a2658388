"""Routing and attention by kernels of ours, which read keys where they stand, by groups and what is read: Triton's on
a GPU, where nothing is read back from the device, and the native library's on a CPU. Inference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..routing import cells
from ..routing.cells import CellRouter
from . import native
from .definition import Pattern
from .kernels import triton_missing
from .problem import Problem, Scores

if TYPE_CHECKING:
    from .kernels.triton_prompt import PromptTokens

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
    numbers = _numbers(who.pattern, scores)
    tensors = (problem.query, problem.key, problem.value, who.key_groups, who.reads)
    padded, count = who.first_position is None, problem.num_queries
    if count <= FEW_QUERIES:
        return sparse_decode(
            *tensors,
            who.positions[:, -count:],
            key_positions=who.positions if padded else None,
            **numbers,
        )
    tokens = PromptTokens.from_positions(who.positions, count) if padded else None
    return sparse_prompt(*tensors, tokens=tokens, **numbers)[0]


def reads_in_place(query: Tensor, key: Tensor, key_groups: Tensor, scores: Scores) -> bool:
    """Whether `decode_in_place` can compute with tensors like these."""
    if not scores.is_plain or key_groups.dtype != torch.uint8 or query.dtype != key.dtype:
        return False
    if query.device.type == "cuda":
        return triton_missing() is None
    return native.is_native(query, key)


def decode_in_place(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_groups: Tensor,
    reads: Tensor,
    positions: Tensor,
    table: Tensor,
    pattern: Pattern,
    scores: Scores,
) -> Tensor:
    """Attention of one new token of each of many sequences, whose keys stand in an engine's blocks; see
    `reads_in_place`.

    Args:
        query: ``(R, H, 1, D)``.
        key, value: ``(blocks, H_kv, block size, D or D_v)``, any strides, the last dimension contiguous.
        key_groups: uint8 ``(blocks, H_kv, block size)``, any strides.
        reads: bool ``(R, H_kv, 1, K, bands)``.
        positions: integers ``(R,)``, of the tokens, which are the newest of their sequences.
        table: int32 ``(R, most blocks)``, the blocks of each sequence in order; behind its last one, anything.
        pattern: window, sinks, dense start.
        scores: how they are made.

    Returns:
        ``(R, H, 1, D_v)``.
    """
    tensors, newest = (query, key, value, key_groups, reads), positions[:, None]
    if query.device.type == "cpu":
        edges = torch.cat([torch.zeros_like(newest), newest + 1], dim=1).long()
        return native.attend(tensors, pattern, scores, edges=edges, table=table.int().contiguous())
    from .kernels.triton_gather import sparse_decode  # needs Triton

    return sparse_decode(*tensors, newest, block_table=table, **_numbers(pattern, scores))


def reads_prompts_in_place(query: Tensor, key: Tensor, key_groups: Tensor, scores: Scores) -> bool:
    """Whether `prompts_in_place` can compute with tensors like these: on a GPU; see `reads_in_place`."""
    return query.device.type == "cuda" and reads_in_place(query, key, key_groups, scores)


def prompt_tokens(table: Tensor, block_size: int, lengths: Tensor, query_starts: Tensor, most: int) -> PromptTokens:
    """Where the tokens of many sequences stand in an engine's blocks, see `PromptTokens.from_blocks`."""
    from .kernels.triton_prompt import PromptTokens  # needs Triton

    return PromptTokens.from_blocks(table, block_size, lengths, query_starts, most)


def prompts_in_place(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_groups: Tensor,
    reads: Tensor,
    tokens: PromptTokens,
    pattern: Pattern,
    scores: Scores,
) -> Tensor:
    """Attention of the new tokens of many sequences in one launch, their keys in an engine's blocks.

    Args:
        query: ``(1, H, T, D)``, sequence after sequence.
        key, value, key_groups: see `decode_in_place`.
        reads: bool ``(1, H_c, T, K, bands)``.
        tokens: of `prompt_tokens`; made once for all layers.
        pattern: window, sinks, dense start.
        scores: how they are made.

    Returns:
        ``(1, H, T, D_v)``.
    """
    from .kernels.triton_prompt import sparse_prompt  # needs Triton

    tensors, size = (query, key, value, key_groups, reads), key.shape[2]
    return sparse_prompt(*tensors, tokens=tokens, block_size=size, **_numbers(pattern, scores))[0]


def _numbers(pattern: Pattern, scores: Scores) -> dict[str, Any]:
    """As the Triton kernels are told them."""
    return {
        "scale": scores.scale,
        "local_window": pattern.local_window,
        "sink_tokens": pattern.sink_tokens,
        "dense_below": pattern.dense_below,
        "sink_logits": scores.sink_logits,
    }


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
