"""Cells: each key/value head groups its keys by content, and a query reads groups at distances.

A key is in one group, a function of that key alone before rotary positions. A cell is a group at a distance: distances
beyond the window fall into bands that double, ``(w, 2w], (2w, 4w], ...``, the last one open. A query judges every
cell, and "near", by a softmax over all of them; it reads the cells whose share of its attention, for each position
that the cell's band has before it, is above one threshold.

Who chooses is a *chooser*: the query heads of a key/value head together, or each query head for itself.

Shapes: ``B`` sequences, ``H`` query heads over ``H_kv`` key/value heads, ``H_c`` choosers with ``r = H / H_c`` query
heads each (``H_kv`` or ``H`` of them), ``D`` a head's size, ``Q`` queries, ``S`` keys, ``K`` groups, ``d_g`` their
dimension, ``bands``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional as F

from .shared import at_least_float32, without_autocast

#: Queries whose scores are made at once: few enough to stay in a processor's cache.
_TOGETHER = 256


@dataclass(frozen=True)
class CellRouter:
    """The tensors by which the heads of a layer route, in any floating dtype.

    Scores are computed in float32, or in float64 for keys and queries of float64.

    Args:
        key_projection: ``A``, ``(H_kv, d_g, D)``.
        centroids: ``C``, ``(H_kv, K, d_g)``.
        balance: ``b``, ``(H_kv, K)``.
        query_projection: ``Q``, ``(H_c, d_g, r * D)``.
        band_projection: ``U`` and, last, ``u`` of "near": ``(H_c, bands + 1, r * D)``.
        cell_bias: ``beta``, group by group and within a group band by band, and, last, ``a`` of "near": ``(H_c, K *
            bands + 1)``.
        offset: added to the threshold of each chooser, ``(H_c,)``.
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

    @property
    def choosers_of_key_head(self) -> int:
        """``H_c / H_kv``: 1 where its query heads choose together."""
        return self.offset.shape[0] // self.centroids.shape[0]

    def tensors(self) -> dict[str, Tensor]:
        """What it is made of, by name and in the order above."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def in_two_steps(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Scores of cells and "near" as ``(queries @ first) @ second + bias``; made once.

        Returns:
            ``(H_c, r * D, n)``, ``(H_c, n, cells)`` and ``(H_c, 1, cells)``: ``n = d_g + bands + 1``, ``cells = K *
            bands + 1``.
        """
        if torch.compiler.is_compiling():  # a graph keeps nothing
            return self._two_steps(dtype)
        kept: dict[torch.dtype, tuple[Tensor, Tensor, Tensor]] = vars(self).setdefault("_kept", {})
        if dtype not in kept:
            with torch.inference_mode(False):  # for later calls, whatever mode they are made in
                kept[dtype] = self._two_steps(dtype)
        return kept[dtype]

    def _two_steps(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        first = torch.cat([self.query_projection, self.band_projection], dim=1).to(dtype).transpose(1, 2)
        bands, groups = self.num_bands, self.centroids.shape[1]
        of_groups = self.centroids_of_choosers().to(dtype).transpose(1, 2).repeat_interleave(bands, dim=2)
        of_bands = torch.eye(bands, dtype=dtype, device=first.device).repeat(1, groups).expand(len(first), -1, -1)
        second = F.pad(torch.cat([of_groups, of_bands], dim=1), (0, 1, 0, 1))
        second[:, -1, -1] = 1
        return first, second, self.cell_bias.to(dtype)[:, None]

    def centroids_of_choosers(self) -> Tensor:
        """``C`` of each chooser's key/value head: ``(H_c, K, d_g)``."""
        return self.centroids.repeat_interleave(self.choosers_of_key_head, dim=0)

    def of_heads(self, first: int, count: int) -> CellRouter:
        """The tensors of some of the key/value heads and of who chooses for them."""
        total = self.centroids.shape[0]
        parts = ((t, t.shape[0] // total) for t in self.tensors().values())
        return CellRouter(*(tensor[first * each : (first + count) * each] for tensor, each in parts))


def key_scores(keys: Tensor, router: CellRouter) -> Tensor:
    """How near each key is to each group: ``(A k) . C_c + b_c``, float32 or float64 ``(B, H_kv, S, K)``.

    Args:
        keys: before rotary positions, ``(B, H_kv, S, D)``.
        router: of the layer.
    """
    with without_autocast(keys.device.type):
        x = at_least_float32(keys).transpose(0, 1).flatten(1, 2)
        projected = torch.bmm(x, router.key_projection.to(x).transpose(1, 2))
        scores = torch.baddbmm(router.balance.to(x)[:, None], projected, router.centroids.to(x).transpose(1, 2))
        return scores.unflatten(1, (keys.shape[0], -1)).transpose(0, 1)


def key_groups(keys: Tensor, router: CellRouter) -> Tensor:
    """The group of each key, the nearest: uint8 ``(B, H_kv, S)``; see `key_scores`."""
    return key_scores(keys, router).argmax(dim=-1).to(torch.uint8)


def cell_log_shares(queries: Tensor, router: CellRouter) -> Tensor:
    """How a query's attention is expected to fall on cells: the log-softmax over all of them and, last, "near".

    Args:
        queries: after rotary positions, ``(B, H, Q, D)``.
        router: of the layer.

    Returns:
        float32 or float64 ``(B, H_c, Q, K * bands + 1)``, group by group and within a group band by band.
    """
    (batch, _, count, dim), choosers = queries.shape, router.offset.shape[0]
    # The query heads of a chooser side by side.
    x = at_least_float32(queries).reshape(batch, choosers, -1, count, dim).permute(1, 0, 3, 2, 4)
    with without_autocast(queries.device.type):
        first, second, bias = router.in_two_steps(x.dtype)
        scores = torch.baddbmm(bias, torch.bmm(x.reshape(choosers, batch * count, -1), first), second)
        return scores.log_softmax(dim=-1).view(choosers, batch, count, -1).transpose(0, 1)


def positions_in_bands(positions: Tensor, local_window: int, num_bands: int) -> Tensor:
    """How many positions each band of distance has before a query: int64 ``(B, Q, bands)``.

    Args:
        positions: of queries, integers ``(B, Q)``.
        local_window: ``w``; 0 counts as 1.
        num_bands: the last one is open.
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


def finest(device: torch.device) -> torch.dtype:
    """The floating dtype in which a device computes most finely: a logarithm made in it and rounded to float32 is the
    same alone and among many, which two that are made in float32 may not be."""
    return torch.float32 if device.type == "mps" else torch.float64


def cell_limits(positions: Tensor, threshold: Tensor | float, local_window: int, num_bands: int) -> Tensor:
    """What the log-share of a cell is compared with: ``log(positions of its band before i) + threshold``.

    Args:
        positions, local_window, num_bands: see `positions_in_bands`.
        threshold: the dial, one for all or float ``(B, Q)``; lower reads more.

    Returns:
        float32 ``(B, Q, bands)``.
    """
    counts = positions_in_bands(positions, local_window, num_bands).clamp(min=1)
    sizes = counts.to(finest(positions.device)).log().float()
    return sizes + (threshold[..., None] if isinstance(threshold, Tensor) else threshold)


def cell_reads(queries: Tensor, router: CellRouter, limits: Tensor) -> Tensor:
    """The cells that queries read: those whose log-share is above its limit by the chooser's offset.

    Args:
        queries, router: see `cell_log_shares`.
        limits: `cell_limits` of them, ``(B or 1, Q, bands)``.

    Returns:
        bool ``(B, H_c, Q, K, bands)``.
    """
    if queries.shape[2] > _TOGETHER:
        parts = zip(queries.split(_TOGETHER, dim=2), limits.split(_TOGETHER, dim=1), strict=True)
        return torch.cat([cell_reads(some, router, limit) for some, limit in parts], dim=2)
    shares = cell_log_shares(queries, router)[..., :-1]
    limits = limits[:, None] + router.offset.view(-1, 1, 1)
    return shares.view(*shares.shape[:3], -1, router.num_bands) > limits.unsqueeze(-2)
