"""Training of centroids: what a layer keeps, and how long a step takes, against the gate spelled out in full."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..attention import gated_attention
from .attention import random_call
from .settings import Measurement, Setting
from .timing import interleaved

#: Strength of the gate; any value costs the same.
STRENGTH = 4.0


def bench_training(setting: Setting, seconds: float = 5.0) -> list[Measurement]:
    """Forward and backward of one layer's additive gate.

    Returns:
        Time (``"training"``) and bytes kept for the backward (``"training memory"``), against a ``T x T`` bias.
    """
    query, key, value, _ = random_call(setting, setting.length)
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    scores = torch.randn(1, setting.length, setting.num_groups, device=setting.device) * 3
    assignments = torch.softmax(scores, dim=-1).requires_grad_()
    positions = torch.arange(setting.length, device=setting.device)[None]
    scale = setting.head_dim**-0.5

    def focus() -> Tensor:
        q, k, v = leaves
        return gated_attention(
            q, k, v, setting.pattern, positions, assignments, scale, gate="additive", strength=STRENGTH
        )

    spelled_out = functools.partial(_spelled_out, leaves, setting, positions, assignments, scale)
    functions = {"dense": spelled_out, "focus": focus}
    kept = {name: _kept_bytes(function) for name, function in functions.items()}
    steps = {name: functools.partial(_step, function, [*leaves, assignments]) for name, function in functions.items()}
    times = interleaved(steps, setting.device, seconds, least=3)
    baseline = "SDPA with a T x T bias"
    return [
        Measurement("training", setting, times["dense"], times["focus"], baseline=baseline),
        Measurement("training memory", setting, kept["dense"], kept["focus"], baseline=baseline),
    ]


def _spelled_out(
    leaves: list[Tensor], setting: Setting, positions: Tensor, assignments: Tensor, scale: float
) -> Tensor:
    i, j = positions[:, :, None], positions[:, None, :]
    gated = (i - j > setting.local_window) & (j >= setting.sink_tokens)
    bias = torch.where(gated, STRENGTH * (assignments @ assignments.mT - 1.0), 0.0)
    bias = bias.masked_fill(j > i, float("-inf")).to(leaves[0].dtype)
    grouped_queries = setting.heads != setting.kv_heads
    query, key, value = leaves
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias[:, None], scale=scale, enable_gqa=grouped_queries
    )


def _step(function: Any, leaves: list[Tensor]) -> None:
    torch.autograd.grad(function().square().sum(), leaves)


def _kept_bytes(function: Any) -> int:
    """Bytes of all tensors that a forward keeps for its backward, each storage once."""
    storages: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        output = function()
    del output
    return sum(storages.values())
