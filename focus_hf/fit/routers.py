"""The routing of a layer's KV heads, fitted to what was captured: groups of keys, and queries that read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import routing
from .clusters import balanced_kmeans, reduce_directions
from .importance import DenseRows
from .linear import ridge
from .query_router import group_importance, query_scores, train_query_router
from .recipe import FitRecipe
from .store import LayerWindow

#: Tokens from which groups are made and balanced.
_TOKENS = 8192

#: Steps in which their balance potentials are found.
_BALANCING = 20

#: Spread of the scores; memberships do not depend on it.
_SPREAD = 2.0


@dataclass(frozen=True)
class Routers:
    """Routing of ``n`` KV heads, float32, for scores at temperature 1.

    A key belongs to the group with the largest ``(W_k h) . C + b``, a query reads those with the largest
    ``(W_q h) . C + c``.

    Args:
        key_projection: ``W_k``, ``(n, d_g, d)``.
        query_projection: ``W_q``, ``(n, d_g, d)``.
        centroids: ``C``, ``(n, K, d_g)``.
        balance: ``b``, ``(n, K)``.
        query_bias: ``c``, ``(n, K)``.
    """

    key_projection: Tensor
    query_projection: Tensor
    centroids: Tensor
    balance: Tensor
    query_bias: Tensor

    def key_groups(self, hidden: Tensor) -> Tensor:
        """``(T, d)`` to the group of each token in each head, int64 ``(n, T)``."""
        return query_scores(hidden, self.key_projection, self.centroids, self.balance).argmax(dim=-1)

    def query_scores(self, hidden: Tensor) -> Tensor:
        """``(N, d)`` to ``(n, N, K)``."""
        return query_scores(hidden, self.query_projection, self.centroids, self.query_bias)


@torch.no_grad()
def fit_routers(windows: Sequence[LayerWindow], recipe: FitRecipe, generator: torch.Generator) -> Routers:
    """Fit a layer's routing to windows of text.

    Args:
        windows: of one layer.
        recipe: number and dimension of groups, window, sinks, steps.
        generator: of everything random.
    """
    start = cluster_keys(windows, recipe.num_groups, recipe.group_dim, generator)
    hidden = torch.cat([window.hidden[window.positions] for window in windows])
    targets = torch.cat([_targets(window, start, recipe) for window in windows], dim=1)
    mean = hidden.mean(dim=0)
    projection, bias = train_query_router(
        hidden - mean, targets, start.query_projection, start.centroids, recipe.steps, generator
    )
    bias = bias - query_scores(mean[None], projection, start.centroids, torch.zeros_like(bias))[:, 0]
    return Routers(start.key_projection, projection, start.centroids, start.balance, bias)


def cluster_keys(windows: Sequence[LayerWindow], num_groups: int, dim: int, generator: torch.Generator) -> Routers:
    """Balanced groups of every head's keys before rotary positions, and queries read by their product with centroids.

    Hidden states are mapped to keys by least squares, so that nothing needs to be known of the layer's projections.
    """
    hidden = torch.cat([window.hidden for window in windows])
    keys = torch.cat([window.plain_keys for window in windows], dim=1)
    queries = torch.cat([window.plain_queries for window in windows], dim=1)
    directions, centroids = [], []
    every = max(1, hidden.shape[0] // _TOKENS)
    for of_head in keys:
        kept, along = reduce_directions(balanced_kmeans(of_head[::every], num_groups, generator), dim)
        directions.append(kept)
        centroids.append(along)
    axes, points = torch.stack(directions), torch.stack(centroids)
    of_queries = torch.cat([window.hidden[window.positions] for window in windows])
    key_projection = _read_along(hidden, keys, axes, points)
    query_projection = _read_along(of_queries, queries, axes, points)
    nothing = points.new_zeros(points.shape[:2])
    scores = query_scores(hidden[::every], key_projection, points, nothing)
    balance = torch.stack([routing.calibrate_balance(of_head, top_k=1, steps=_BALANCING) for of_head in scores])
    return Routers(key_projection, query_projection, points, balance, nothing)


def _read_along(hidden: Tensor, vectors: Tensor, axes: Tensor, centroids: Tensor) -> Tensor:
    """From hidden states ``(N, d)`` to heads' vectors ``(n, N, D)`` along their axes ``(n, d_g, D)``, least squares.

    Returns ``(n, d_g, d)``, scaled so that scores have the usual spread.
    """
    targets = torch.einsum("nid,nad->ina", vectors, axes)
    projection = ridge(hidden, targets.flatten(1)).view(*axes.shape[:2], -1)
    some = hidden[:: max(1, hidden.shape[0] // _TOKENS)]
    scores = query_scores(some, projection, centroids, centroids.new_zeros(centroids.shape[:2]))
    spread = (scores - scores.mean(dim=1, keepdim=True)).square().mean(dim=(1, 2)).sqrt().clamp(min=1e-9)
    return projection * (_SPREAD / spread)[:, None, None]


def _targets(window: LayerWindow, routers: Routers, recipe: FitRecipe) -> Tensor:
    """How much each group matters to each kept query of a window, ``(n, R, K)``; 0 where nothing is far away."""
    groups = routers.key_groups(window.hidden)
    found = []
    for number in range(window.num_heads):
        parts = map(DenseRows.of, window.head(number).parts())
        found.append(
            torch.cat(
                [
                    group_importance(
                        rows,
                        groups[number, : rows.length],
                        recipe.num_groups,
                        rows.is_far(recipe.local_window, recipe.sink_tokens),
                    )
                    for rows in parts
                ]
            )
        )
    return torch.stack(found)
