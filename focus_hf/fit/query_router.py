"""Which cells a query should read: shares of a softmax, trained towards where dense attention's importance lies."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..routing.cells import CellRouter
from .minimize import BATCH, minimize

_LEARNING_RATE = 0.01


def train_query_router(
    router: CellRouter, queries: Tensor, importance: Tensor, often: Tensor, steps: int, generator: torch.Generator
) -> CellRouter:
    """Fit what judges queries, of several heads, by cross-entropy; centroids stay as they are.

    A query weighs the more, up to a limit, the more there is for it that is not near: those that need nothing far away
    teach little, and no few decide alone. Queries start from their product with the centroids.

    Args:
        router: that groups keys.
        queries: rotated, the ``r`` of a chooser side by side, float32 ``(n, N, r D)``; choosers of one key/value head
            follow each other.
        importance: of each cell and of "near" to each query, ``(n, N, K * bands + 1)``.
        often: how often each query is to be drawn, beside the others: float ``(N,)``.
        steps: of Adam, with cosine decay.
        generator: of the batches.

    Returns:
        The router with the rest of its tensors, float32 numbers that float16 holds.
    """
    mean = queries.mean(dim=1, keepdim=True)
    spread = (queries - mean).square().mean(dim=(1, 2), keepdim=True).sqrt().clamp(min=1e-9)
    queries = (queries - mean) / spread
    targets = _weighted(importance)
    each, per_chooser = len(queries) // len(router.centroids), queries.shape[-1] // router.key_projection.shape[-1]
    project, centroids = (x.repeat_interleave(each, dim=0) for x in (router.key_projection, router.centroids))
    often = often / often.sum()
    bias = ((targets * often[:, None]).sum(dim=1) + 1e-6).log()
    bands = targets.shape[-1] // centroids.shape[1]
    learnt = [
        project.repeat(1, 1, per_chooser) * (0.3 * spread / per_chooser),
        queries.new_zeros(len(queries), bands + 1, queries.shape[-1]),
        bias - bias.logsumexp(dim=-1, keepdim=True),
    ]

    def loss() -> Tensor:
        some = often.multinomial(min(BATCH, len(often)), replacement=True, generator=generator)
        scores, wanted = _scores(queries[:, some], centroids, *learnt), targets[:, some]
        crossed = wanted.sum(dim=-1) * scores.logsumexp(dim=-1) - (wanted * scores).sum(dim=-1)
        return crossed.mean(dim=1).sum()

    minimize(loss, dict.fromkeys(learnt, _LEARNING_RATE), steps)
    # The same scores from queries as they are, their mean folded into the bias.
    projection, of_bands, bias = (p.detach() for p in learnt)
    projection, of_bands = projection / spread, of_bands / spread
    at_mean = _scores(mean, centroids, projection, of_bands, bias)[:, 0] - bias
    projection, of_bands, bias = (each.half().float() for each in (projection, of_bands, bias - at_mean))
    offset = bias.new_zeros(len(bias))
    return replace(router, query_projection=projection, band_projection=of_bands, cell_bias=bias, offset=offset)


def _scores(queries: Tensor, centroids: Tensor, projection: Tensor, bands: Tensor, bias: Tensor) -> Tensor:
    """What `cell_log_shares` takes the softmax of, from ``(n, N, r D)``: ``(n, N, K * bands + 1)``, "near" last."""
    by_group = torch.matmul(torch.matmul(queries, projection.transpose(1, 2)), centroids.transpose(1, 2))
    by_band = torch.matmul(queries, bands.transpose(1, 2))
    cells = (by_group[..., None] + by_band[..., None, :-1]).flatten(-2)
    return torch.cat([cells, by_band[..., -1:]], dim=-1) + bias[:, None]


def _weighted(importance: Tensor) -> Tensor:
    """Targets: a query's distribution over cells and "near", times its weight, which is about 1 on average."""
    total = importance.sum(dim=-1, keepdim=True).clamp(min=1e-30)
    far = total - importance[..., -1:]
    targets = importance / total * (far / (far + far.mean(dim=1, keepdim=True)).clamp(min=1e-30))
    return targets / targets.sum(dim=(1, 2), keepdim=True).clamp(min=1e-30) * targets.shape[1]
