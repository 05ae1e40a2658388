"""Cells: each key/value head groups its keys by content, and a query reads groups at distances.

A key is in one group, a function of that key alone before rotary positions. A cell is a group at a distance: distances
beyond the window fall into bands that double, ``(w, 2w], (2w, 4w], ...``, the last one open. A query judges every
cell, and "near", by a softmax over all of them; it reads the cells whose share of its attention, for each position
that the cell's band has before it, is above one threshold.

Shapes: ``B`` sequences, ``H_kv`` key/value heads with ``r`` query heads each, ``D`` their size, ``Q`` queries, ``S``
keys, ``K`` groups, ``d_g`` their dimension, ``bands``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from .shared import without_autocast

#: Queries whose scores are made at once: few enough to stay in a processor's cache.
_TOGETHER = 512


@dataclass(frozen=True)
class CellRouter:
    """The tensors by which the key/value heads of a layer route, in any floating dtype; computed in float32.

    Args:
        key_projection: ``A``, ``(H_kv, d_g, D)``.
        centroids: ``C``, ``(H_kv, K, d_g)``.
        balance: ``b``, ``(H_kv, K)``.
        query_projection: ``Q``, ``(H_kv, d_g, r * D)``.
        band_projection: ``U`` and, last, ``u`` of "near": ``(H_kv, bands + 1, r * D)``.
        cell_bias: ``beta``, group by group and within a group band by band, and, last, ``a`` of "near": ``(H_kv, K *
            bands + 1)``.
        offset: added to the threshold of each head, ``(H_kv,)``.
    """

    key_projection: Tensor
    centroids: Tensor
    balance: Tensor
    query_projection: Tensor
    band_projection: Tensor
    cell_bias: Tensor
    offset: Tensor

    @property
    def num_bands(self) -> int:
        """Bands of distance."""
        return self.band_projection.shape[1] - 1


def key_scores(keys: Tensor, router: CellRouter) -> Tensor:
    """How near each key is to each group: ``(A k) . C_c + b_c``.

    Args:
        keys: before rotary positions, ``(B, H_kv, S, D)``.
        router: of the layer.

    Returns:
        float32 ``(B, H_kv, S, K)``.
    """
    with without_autocast(keys.device.type):
        projected = torch.matmul(keys.float(), router.key_projection.float().transpose(-1, -2))
        return torch.matmul(projected, router.centroids.float().transpose(-1, -2)) + router.balance.float()[:, None]


def key_groups(keys: Tensor, router: CellRouter) -> Tensor:
    """The group of each key, the nearest: uint8 ``(B, H_kv, S)``; see `key_scores`."""
    return key_scores(keys, router).argmax(dim=-1).to(torch.uint8)


def cell_log_shares(queries: Tensor, router: CellRouter) -> tuple[Tensor, Tensor]:
    """How a query's attention is expected to fall on cells: the log-softmax over all of them and "near".

    Args:
        queries: after rotary positions, ``(B, H, Q, D)``.
        router: of the layer.

    Returns:
        Log-shares of cells, float32 ``(B, H_kv, Q, K, bands)``, and of "near", ``(B, H_kv, Q)``.
    """
    kv_heads, num_groups = router.centroids.shape[:2]
    x = queries.unflatten(1, (kv_heads, -1)).transpose(2, 3).flatten(-2)
    with without_autocast(queries.device.type):
        x = x.float()
        by_group = torch.matmul(
            torch.matmul(x, router.query_projection.float().transpose(-1, -2)),
            router.centroids.float().transpose(-1, -2),
        )
        by_band = torch.matmul(x, router.band_projection.float().transpose(-1, -2))
        bias = router.cell_bias.float()
        cells = by_group[..., None] + by_band[..., None, :-1]
        cells = cells + bias[:, None, :-1].unflatten(-1, (num_groups, router.num_bands))
        near = by_band[..., -1] + bias[:, None, -1]
        total = torch.logaddexp(cells.flatten(-2).logsumexp(dim=-1), near)
    return cells - total[..., None, None], near - total


def positions_in_bands(positions: Tensor, local_window: int, num_bands: int) -> Tensor:
    """How many positions each band of distance has before a query.

    Args:
        positions: of queries, integers ``(B, Q)``.
        local_window: ``w``; 0 counts as 1.
        num_bands: the last one is open.

    Returns:
        int64 ``(B, Q, bands)``.
    """
    starts, lengths = _bands(max(local_window, 1), num_bands, positions.device)
    return torch.minimum((positions.long()[..., None] - starts).clamp(min=0), lengths)


@functools.lru_cache(maxsize=8)
def _bands(width: int, num_bands: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where each band of distance begins, and how long it is: int64 ``(bands,)``."""
    with torch.inference_mode(False):
        starts = width * 2 ** torch.arange(num_bands, device=device)
        lengths = starts.clone()
        lengths[-1:] = torch.iinfo(torch.int64).max
        return starts, lengths


def cell_reads(
    queries: Tensor, positions: Tensor, router: CellRouter, threshold: Tensor | float, local_window: int
) -> Tensor:
    """The cells that queries read: ``log p_i[c, band] - log(positions of that band before i) > threshold + offset``.

    Args:
        queries: after rotary positions, ``(B, H, Q, D)``.
        positions: of the queries, integers ``(B, Q)``.
        router: of the layer.
        threshold: the dial, one for all or float ``(B, Q)``; lower reads more.
        local_window: ``w``.

    Returns:
        bool ``(B, H_kv, Q, K, bands)``.
    """
    sizes = positions_in_bands(positions, local_window, router.num_bands)
    if isinstance(threshold, Tensor):
        threshold = threshold[:, None, :, None]
    limits = threshold + router.offset.float()[:, None, None] + sizes[:, None].clamp(min=1).float().log()
    both = zip(queries.split(_TOGETHER, dim=2), limits.split(_TOGETHER, dim=2), strict=True)
    parts = [cell_log_shares(some, router)[0] > limit[..., None, :] for some, limit in both]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
