"""What each head reads and loses under every threshold, and in windows: sums over queries, by octaves of position.

Everything about the dial follows from these (`dial`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ..attention import Pattern
from ..routing.cells import CellRouter, cell_log_shares, key_groups, positions_in_bands
from .importance import DenseRows, LayerWindow, cells_of_keys, sums_by_cell

#: Thresholds at which everything is measured, from the one that reads most.
STEP = 0.25
THRESHOLDS = torch.arange(-24.0, 4.0, STEP)

#: Queries are told apart by the octave of their position: this many, the first one up to 2 ** 4.
OCTAVES = 20
_FIRST_OCTAVE = 4

_NOTHING = 1e-12


@dataclass(frozen=True)
class HeadCurves:
    """Sums over queries, of ``n`` heads, ``O`` octaves and ``G`` thresholds, float64.

    Args:
        loss: half the Fisher cost (see `importance`), ``(n, O, G)``.
        pairs: attended, likewise.
        window_loss: the same with windows in the place of cells, each twice as wide as the one before, from the
            pattern's own on, ``(n, O, bands)``.
        window_pairs: attended in these, ``(O, bands)``.
        queries: how many there were, ``(O,)``.
        possible: pairs of theirs in dense attention, ``(O,)``.
    """

    loss: Tensor
    pairs: Tensor
    window_loss: Tensor
    window_pairs: Tensor
    queries: Tensor
    possible: Tensor

    def before(self, length: int) -> HeadCurves:
        """Summed over the queries at positions below a length, a power of two: one octave."""
        octaves = int(octave(torch.tensor(length - 1))) + 1
        of_heads = (each[:, :octaves].sum(1, keepdim=True) for each in (self.loss, self.pairs, self.window_loss))
        of_all = (each[:octaves].sum(0, keepdim=True) for each in (self.window_pairs, self.queries, self.possible))
        return HeadCurves(*of_heads, *of_all)

    def shifted(self, offsets: Tensor) -> HeadCurves:
        """As functions of the common threshold, of heads that add an offset to it, ``(n,)``: linear between points."""
        places = torch.arange(len(THRESHOLDS)) + offsets.double()[:, None, None] / STEP
        return replace(self, loss=at_places(self.loss, places), pairs=at_places(self.pairs, places))


def at_places(values: Tensor, places: Tensor) -> Tensor:
    """What stands at places such as 3.5 of lists: linear between two, and beyond the ends as there.

    Args:
        values: lists, float64 ``(..., G)``.
        places: float64 ``(..., P)``.

    Returns:
        ``(..., P)``, leading dimensions as they broadcast.
    """
    last = values.shape[-1] - 1
    shape = torch.broadcast_shapes(values.shape[:-1], places.shape[:-1])
    values, places = values.expand(*shape, -1), places.clamp(0, last).expand(*shape, -1)
    lower = places.floor().long()
    return torch.lerp(values.gather(-1, lower), values.gather(-1, (lower + 1).clamp(max=last)), places - lower)


def place_of(value: float, ascending: Tensor) -> float:
    """Where a value is among those of an ascending list, such as 3.5."""
    upper = int(torch.searchsorted(ascending, value).clamp(1, len(ascending) - 1))
    low, high = float(ascending[upper - 1]), float(ascending[upper])
    return upper - 1 + min(1.0, max(0.0, (value - low) / max(high - low, 1e-12)))


def octave(positions: Tensor) -> Tensor:
    """0 below 16, then 1 below 32, and so on: int64."""
    return (positions.clamp(min=1).double().log2().floor().long() - (_FIRST_OCTAVE - 1)).clamp(0, OCTAVES - 1)


def joined(curves: Iterable[HeadCurves]) -> HeadCurves:
    """The heads of several layers, measured on the same queries."""
    found = list(curves)
    names = ("loss", "pairs", "window_loss")
    return replace(found[0], **{name: torch.cat([getattr(each, name) for each in found]) for name in names})


@torch.no_grad()
def measure(windows: Iterable[LayerWindow], router: CellRouter, pattern: Pattern) -> HeadCurves:
    """What a layer's heads read and lose under every threshold, whatever their offsets, in windows of that layer."""
    heads = router.offset.shape[0]
    loss = torch.zeros(heads, OCTAVES, len(THRESHOLDS), dtype=torch.float64)
    pairs = torch.zeros_like(loss)
    window_loss = loss.new_zeros(heads, OCTAVES, pattern.num_bands)
    window_pairs = loss.new_zeros(OCTAVES, pattern.num_bands)
    queries = loss.new_zeros(OCTAVES)
    possible = torch.zeros_like(queries)
    for window in windows:
        octaves = octave(window.positions)
        queries.index_add_(0, octaves, torch.ones_like(window.positions, dtype=torch.float64))
        possible.index_add_(0, octaves, (window.positions + 1).double())
        groups = key_groups(window.plain_keys[None], router)[0].repeat_interleave(router.choosers_of_key_head, dim=0)
        scores = scores_of(window.queries, log_sizes(window.positions, pattern), router)
        for head, seen in enumerate(window.seen_by(heads)):
            done = 0
            for rows in map(DenseRows.of, seen.parts()):
                these = slice(done, done := done + len(rows.positions))
                sums = sums_of(rows, groups[head], pattern, scores.shape[-1] + 1)
                for attended, of_loss, of_pairs in (
                    (above_thresholds(sums, scores[head, these]), loss[head], pairs[head]),
                    (_in_windows(sums, pattern.num_bands), window_loss[head], window_pairs),
                ):
                    cost, read = cost_of(attended)
                    of_loss.index_add_(0, octaves[these], cost.double())
                    of_pairs.index_add_(0, octaves[these], read.double())
    return HeadCurves(loss, pairs, window_loss, window_pairs / heads, queries, possible)


def log_sizes(positions: Tensor, pattern: Pattern) -> Tensor:
    """Logarithm of the positions that each band has before queries, ``(R,)`` to float32 ``(R, bands)``."""
    counts = positions_in_bands(positions[None], pattern.local_window, pattern.num_bands)[0]
    return counts.clamp(min=1).float().log()


def scores_of(queries: Tensor, sizes: Tensor, router: CellRouter) -> Tensor:
    """What is compared with a threshold: of queries ``(H, R, D)`` with `log_sizes`, ``(H_c, R, K * bands)``."""
    shares = cell_log_shares(queries[None], router)[0, ..., :-1].unflatten(-1, (-1, router.num_bands))
    return (shares - sizes[None, :, None]).flatten(-2)


def cost_of(attended: Tensor) -> tuple[Tensor, Tensor]:
    """Half the Fisher cost (see `importance`), summed over query heads, and pairs.

    Args:
        attended: `sums_of`, added up over what is attended, ``(2r + 1, ...)``.

    Returns:
        ``(...)`` each.
    """
    heads = len(attended) // 2
    weight, effect, pairs = attended.split([heads, heads, 1])
    return (effect / weight.clamp(min=_NOTHING)).square().sum(dim=0) / 2, pairs[0]


def sums_of(rows: DenseRows, groups: Tensor, pattern: Pattern, count: int) -> Tensor:
    """By cell, "near" and a learned sink last: weights and effects of the ``r`` query heads, and pairs.

    Args:
        rows: of a window's queries.
        groups: of the window's keys.
        pattern: window, sinks and bands.
        count: cells, with "near".

    Returns:
        ``(2r + 1, R, count)``.
    """
    cells = cells_of_keys(groups[: rows.length], rows.positions, pattern, count // pattern.num_bands)
    earlier = (torch.arange(rows.length) <= rows.positions[:, None]).float()
    sums = sums_by_cell(torch.cat([rows.weights, rows.effects, earlier[None]]), cells, count)
    sums[:-1, :, -1] += torch.cat([rows.sink_weight, rows.sink_effect])[..., 0]
    return sums


def above_thresholds(sums: Tensor, scores: Tensor) -> Tensor:
    """What is attended where the cells with scores ``(R, cells)`` above a threshold are read: ``(2r + 1, R, G)``."""
    ranked, order = scores.sort(dim=-1, descending=True)
    read = sums[..., :-1].gather(-1, order.expand(len(sums), -1, -1)).cumsum(dim=-1)
    count = torch.searchsorted(-ranked, (-THRESHOLDS).expand(len(scores), -1).contiguous())
    return (F.pad(read, (1, 0)) + sums[..., -1:]).gather(-1, count.expand(len(sums), -1, -1))


def _in_windows(sums: Tensor, bands: int) -> Tensor:
    """What is attended in the window, and in those that reach to the end of a band: ``(2r + 1, R, bands)``."""
    by_band = sums[..., :-1].unflatten(-1, (-1, bands)).sum(dim=-2)[..., :-1]
    return torch.cat([sums[..., -1:], by_band], dim=-1).cumsum(dim=-1)
