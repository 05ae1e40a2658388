"""Training of centroids: how long a step of a layer takes, and what it keeps for its backward, as a table in Markdown.

python -m studies.training 1024 2048 4096
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from focus_hf import routing
from focus_hf.attention import Problem, credit_memberships, focus_attention
from focus_hf.bench import Measurement, Setting, to_markdown
from focus_hf.bench.attention import random_problem, who_attends
from focus_hf.bench.timing import interleaved
from focus_hf.machine import environment, summary

#: Strength of the soft gate that is spelled out; any value costs the same.
STRENGTH = 4.0


def measure_training(setting: Setting, seconds: float = 5.0) -> list[Measurement]:
    """Forward and backward of one layer's attention with gradients for queries, keys, values and assignments.

    Returns:
        Time (``"training"``) against dense attention, and bytes kept for the backward (``"training memory"``) against
        a soft gate that is spelled out as a ``T x T`` bias.
    """
    problem = random_problem(setting)
    query, key, value = leaves = [x.detach().requires_grad_() for x in (problem.query, problem.key, problem.value)]
    scores = torch.randn(1, setting.length, setting.num_groups, device=setting.device) * 3
    assignments = torch.softmax(scores, dim=-1).requires_grad_()
    memberships = routing.hard_memberships(scores, scores.new_zeros(setting.num_groups), setting.top_k)
    who, scale = who_attends(setting, memberships, setting.length), problem.scores.scale
    problem = Problem(query, key, value, who, problem.scores)

    def focus() -> Tensor:
        output = focus_attention(problem)
        return credit_memberships(output, routing.straight_through(memberships, assignments), problem)

    def dense() -> Tensor:
        grouped_queries = setting.heads != setting.kv_heads
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=grouped_queries
        )

    spelled_out = functools.partial(_spelled_out, leaves, setting, who.positions, assignments, scale)
    steps = {
        "dense": functools.partial(_step, dense, leaves),
        "focus": functools.partial(_step, focus, [*leaves, assignments]),
    }
    times = interleaved(steps, setting.device, seconds, least=3)
    kept = {"bias": _kept_bytes(spelled_out), "focus": _kept_bytes(focus)}
    return [
        Measurement("training", setting, times["dense"], times["focus"], baseline="SDPA"),
        Measurement("training memory", setting, kept["bias"], kept["focus"], baseline="SDPA with a T x T bias"),
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.empty(31 * 2**20, dtype=torch.uint8)  # the allocator keeps from now on what it frees
    lengths = [int(length) for length in sys.argv[1:]] or [1024, 2048, 4096]
    print(to_markdown([measured for length in lengths for measured in measure_training(Setting(length))]))
    print(f"\n{summary(environment())}")
