"""Attention on a GPU by kernels of ours, which read keys where they stand, by their groups and what queries read.

Nothing is read back from the device. Inference; with Triton.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
