"""Which cells a query should read: shares of a softmax, trained towards where dense attention's importance lies."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_BATCH = 1024
_LEARNING_RATE = 0.01

#: Of the random numbers that it starts from nothing is left: the first steps are small.
_WARMUP = 20


@dataclass(frozen=True)
class QueryRouter:
    """The part of a `CellRouter` that judges queries, of ``n`` heads, float32.

    Args:
        projection: ``Q``, ``(n, d_g, r D)``.
        bands: ``U`` and ``u``, ``(n, bands + 1, r D)``.
        bias: ``beta`` and ``a``, ``(n, K * bands + 1)``.
    """

    projection: Tensor
    bands: Tensor
    bias: Tensor

    def scores(self, queries: Tensor, centroids: Tensor) -> Tensor:
        """``(n, N, r D)`` to scores of every cell and, last, of "near": ``(n, N, K * bands + 1)``."""
        by_group = torch.matmul(torch.matmul(queries, self.projection.transpose(1, 2)), centroids.transpose(1, 2))
        by_band = torch.matmul(queries, self.bands.transpose(1, 2))
        cells = (by_group[..., None] + by_band[..., None, :-1]).flatten(-2)
        return torch.cat([cells, by_band[..., -1:]], dim=-1) + self.bias[:, None]


def train_query_router(
    queries: Tensor,
    importance: Tensor,
    key_projection: Tensor,
    centroids: Tensor,
    steps: int,
    generator: torch.Generator,
) -> QueryRouter:
    """Fit several heads by cross-entropy, centroids as they are.

    A query weighs the more, up to a limit, the more there is for it that is not near: those that need nothing far away
    teach little, and no few decide alone. Queries start from their product with the centroids.

    Args:
        queries: rotated, the ``r`` of a key/value head side by side, float32 ``(n, N, r D)``.
        importance: of each cell and of "near" to each query, ``(n, N, K * bands + 1)``.
        key_projection: ``A``, ``(n, d_g, D)``.
        centroids: ``C``, ``(n, K, d_g)``.
        steps: of Adam, with cosine decay.
        generator: of the batches.
    """
    mean = queries.mean(dim=1, keepdim=True)
    spread = (queries - mean).square().mean(dim=(1, 2), keepdim=True).sqrt().clamp(min=1e-9)
    queries = (queries - mean) / spread
    targets = _weighted(importance)
    per_key_head = queries.shape[-1] // key_projection.shape[-1]
    start = key_projection.repeat(1, 1, per_key_head) * (0.3 * spread / per_key_head)
    bias = (targets.mean(dim=1) + 1e-6).log()
    bands = targets.shape[-1] // centroids.shape[1]
    router = QueryRouter(
        start.requires_grad_(),
        queries.new_zeros(len(queries), bands + 1, queries.shape[-1], requires_grad=True),
        (bias - bias.logsumexp(dim=-1, keepdim=True)).requires_grad_(),
    )
    optimizer = torch.optim.Adam([router.projection, router.bands, router.bias], _LEARNING_RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / _WARMUP) * 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    with torch.enable_grad():
        for _ in range(steps):
            some = torch.randint(queries.shape[1], (min(_BATCH, queries.shape[1]),), generator=generator)
            scores, wanted = router.scores(queries[:, some], centroids), targets[:, some]
            loss = wanted.sum(dim=-1) * scores.logsumexp(dim=-1) - (wanted * scores).sum(dim=-1)
            optimizer.zero_grad()
            loss.mean(dim=1).sum().backward()
            optimizer.step()
            schedule.step()
    return _unscaled(router, mean, spread, centroids)


def _weighted(importance: Tensor) -> Tensor:
    """Targets: a query's distribution over cells and "near", times its weight, which is about 1 on average."""
    total = importance.sum(dim=-1, keepdim=True).clamp(min=1e-30)
    far = total - importance[..., -1:]
    targets = importance / total * (far / (far + far.mean(dim=1, keepdim=True)).clamp(min=1e-30))
    return targets / targets.sum(dim=(1, 2), keepdim=True).clamp(min=1e-30) * targets.shape[1]


@torch.no_grad()
def _unscaled(router: QueryRouter, mean: Tensor, spread: Tensor, centroids: Tensor) -> QueryRouter:
    """The same scores from queries as they are, their mean folded into the bias."""
    found = QueryRouter(router.projection / spread, router.bands / spread, router.bias)
    at_mean = found.scores(mean, centroids)[:, 0] - found.bias
    return QueryRouter(found.projection, found.bands, found.bias - at_mean)
