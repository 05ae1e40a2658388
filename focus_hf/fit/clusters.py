"""Groups of keys: balanced k-means, and the few directions in which its centroids differ.

What comes out holds in float16, and groups are balanced with the numbers as they are saved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import routing
from ..routing.cells import CellRouter

#: Spread of the scores in units of Sinkhorn's temperature, so that its assignments are nearly hard.
_SHARPNESS = 4.0

_SINKHORN_ROUNDS = 8

#: Keys from which the groups of a head are made and balanced.
_KEYS = 8192

#: Steps in which their balance potentials are found.
_BALANCING = 20

#: Spread of the scores; groups do not depend on it.
_SPREAD = 2.0


def cluster_keys(keys: Tensor, num_groups: int, dim: int, generator: torch.Generator) -> CellRouter:
    """Balanced groups of every head's keys.

    Args:
        keys: before rotary positions, float32 ``(n, N, D)``.
        num_groups: ``K``.
        dim: ``d_g``.
        generator: of everything random.

    Returns:
        A router that groups keys, float32 numbers that float16 holds; what judges queries is 0.

    Raises:
        ValueError: there are fewer keys than groups.
    """
    some = torch.randperm(keys.shape[1], generator=generator)[:_KEYS]
    heads = [_cluster_head(of_head[some], num_groups, dim, generator) for of_head in keys]
    projection, centroids, balance = map(torch.stack, zip(*heads, strict=True))
    nothing = keys.new_zeros(len(keys))
    return CellRouter(projection, centroids, balance, nothing, nothing, nothing, nothing)


def _cluster_head(
    points: Tensor, num_groups: int, dim: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """``A``, ``C`` and ``b`` of a head, see `CellRouter`."""
    axes, along = reduce_directions(balanced_kmeans(points, num_groups, generator), dim)
    scores = points @ axes.T @ along.T
    spread = (scores - scores.mean(dim=0)).square().mean().sqrt().clamp(min=1e-9)
    gain = (_SPREAD / spread).sqrt()
    axes, along = ((gain * tensor).half().float() for tensor in (axes, along))
    balance = routing.calibrate_balance(points @ axes.T @ along.T, top_k=1, steps=_BALANCING)
    return axes, along, balance.half().float()


def balanced_kmeans(points: Tensor, num_groups: int, generator: torch.Generator, iterations: int = 15) -> Tensor:
    """Centroids of groups of nearly equal size: k-means whose assignments are balanced by Sinkhorn.

    It starts from points far apart (k-means++, Arthur and Vassilvitskii, SODA 2007).

    Args:
        points: float32 ``(N, D)``, ``N >= num_groups``.
        num_groups: ``K``.
        generator: of the points to start from.
        iterations: rounds of assigning and averaging.

    Returns:
        float32 ``(K, D)``.

    Raises:
        ValueError: there are fewer points than groups.
    """
    if points.shape[0] < num_groups:
        raise ValueError(f"{points.shape[0]} points cannot make {num_groups} groups; give more text or fewer groups.")
    centroids = _far_apart(points, num_groups, generator)
    for _ in range(iterations):
        nearness = points @ centroids.T - 0.5 * centroids.square().sum(dim=1)
        assigned = routing.sinkhorn(nearness * (_SHARPNESS / nearness.std().clamp(min=1e-9)), _SINKHORN_ROUNDS)[0]
        members = torch.nn.functional.one_hot(assigned.argmax(dim=1), num_groups).to(points.dtype)
        sizes = members.sum(dim=0)[:, None]
        fresh = points[torch.randperm(points.shape[0], generator=generator)[:num_groups]]  # for a group left empty
        centroids = torch.where(sizes > 0, members.T @ points / sizes.clamp(min=1), fresh)
    return centroids


def _far_apart(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Points drawn one by one, each by its squared distance from those before it."""
    chosen = torch.randint(points.shape[0], (1,), generator=generator)
    distances = torch.full((points.shape[0],), torch.inf)
    for _ in range(count - 1):
        distances = torch.minimum(distances, (points - points[chosen[-1]]).square().sum(dim=1))
        weights = distances if bool(distances.sum() > 0) else torch.ones_like(distances)
        chosen = torch.cat([chosen, torch.multinomial(weights, 1, generator=generator)])
    return points[chosen].clone()


def reduce_directions(centroids: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The directions in which centroids differ most (principal components), and the centroids along them.

    Args:
        centroids: ``(K, D)``.
        dim: how many directions, ``d_g``; what is left over where there are fewer is 0.

    Returns:
        Orthonormal rows ``(d_g, D)``, and ``(K, d_g)``.
    """
    centred = centroids - centroids.mean(dim=0)
    _, _, directions = torch.linalg.svd(centred, full_matrices=False)
    kept = centroids.new_zeros(dim, centroids.shape[1])
    kept[: min(dim, len(directions))] = directions[:dim]
    return kept, centred @ kept.T
