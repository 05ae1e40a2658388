"""Which groups a query should read: linear scores, trained towards where dense attention's importance lies."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from .importance import DenseRows

_BATCH = 1024
_LEARNING_RATE = 0.03


def group_importance(rows: DenseRows, key_groups: Tensor, num_groups: int, far: Tensor) -> Tensor:
    """How much each group's distant keys matter to each query: ``sum_j p_j |e_j|`` over the group and query heads.

    Args:
        rows: of one KV head.
        key_groups: int64 ``(T,)``, the group of each key.
        num_groups: ``K``.
        far: bool ``(R, T)``, the pairs that groups decide about.

    Returns:
        float32 ``(R, K)``.
    """
    importance = rows.effects.abs().sum(dim=0).mul_(far)
    return importance @ F.one_hot(key_groups, num_groups).to(importance.dtype)


def train_query_router(
    hidden: Tensor, targets: Tensor, projection: Tensor, centroids: Tensor, steps: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Fit query projections and biases of several heads by cross-entropy, centroids as they are.

    A query weighs as much as its targets' sum, so that queries with nothing far away do not count.

    Args:
        hidden: float32 ``(N, d)``, about their mean.
        targets: importance of each group to each query, ``(n, N, K)``.
        projection: where to start, ``(n, d_g, d)``.
        centroids: ``(n, K, d_g)``.
        steps: of Adam, with cosine decay.
        generator: of the batches.

    Returns:
        Projections ``(n, d_g, d)`` and biases ``(n, K)``.
    """
    targets = targets / targets.sum(dim=(1, 2), keepdim=True).clamp(min=1e-30) * targets.shape[1]
    weights = projection.clone().requires_grad_()
    bias = projection.new_zeros(centroids.shape[:2]).requires_grad_()
    scale = 3 * float(projection.square().mean().sqrt())
    parameters = [{"params": [weights], "lr": _LEARNING_RATE * scale}, {"params": [bias], "lr": _LEARNING_RATE}]
    optimizer = torch.optim.Adam(parameters, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)))
    with torch.enable_grad():
        for _ in range(steps):
            some = torch.randint(hidden.shape[0], (min(_BATCH, hidden.shape[0]),), generator=generator)
            scores = query_scores(hidden[some], weights, centroids, bias)
            loss = -(targets[:, some] * F.log_softmax(scores, dim=-1)).sum(dim=-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return weights.detach(), bias.detach()


def query_scores(hidden: Tensor, projection: Tensor, centroids: Tensor, bias: Tensor) -> Tensor:
    """``(N, d)`` to scores of every group in every head, ``(n, N, K)``."""
    projected = torch.matmul(hidden, projection.transpose(1, 2))
    return torch.matmul(projected, centroids.transpose(1, 2)) + bias[:, None]
