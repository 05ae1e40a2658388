"""The dial of a fitted adapter: curves of pairs, and what is lost at a share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from .curves import OCTAVES, THRESHOLDS, HeadCurves, at_places, place_of

#: Of an octave whose share of pairs the dial changes by less there is no curve.
_LEAST = 0.05

#: Points of a curve of pairs.
_POINTS = 24


def pairs_curves(curves: HeadCurves) -> dict[str, list[list[float]]]:
    """``pairs_curves`` of an adapter: at the middle of each octave points ``[threshold, share]``, shares ascending.

    Args:
        curves: of all heads, shifted by their offsets.
    """
    found: dict[str, list[list[float]]] = {}
    for number in range(1, OCTAVES):
        if not float(curves.queries[number]):
            continue
        shares = curves.pairs[:, number].mean(dim=0) / curves.possible[number]
        if shares[0] - shares[-1] < _LEAST:  # window and sinks are all there is
            continue
        steps = torch.linspace(0, 1, _POINTS, dtype=torch.float64).square()  # more of them where few pairs are read
        wanted = shares[-1] + steps * (shares[0] - shares[-1])
        places = (shares - wanted[:, None]).abs().argmin(dim=1).unique(sorted=True).flip(0).tolist()
        position = round(float(curves.possible[number] / curves.queries[number]))
        found[str(position)] = [[float(THRESHOLDS[place]), round(float(shares[place]), 5)] for place in places]
    return found


@dataclass(frozen=True)
class DialPoint:
    """The dial at one position, over all heads, in contexts of one length.

    Args:
        threshold: the plain number.
        pairs: share of pairs that is attended.
        loss: estimate of what it adds to the divergence from dense predictions, in nats per token.
        window_loss: the same for one window and sinks with as many pairs.
    """

    threshold: float
    pairs: float
    loss: float
    window_loss: float


def dial(curves: HeadCurves, length: int, shares: Iterable[float]) -> list[DialPoint]:
    """The dial in contexts of a length.

    Args:
        curves: of all heads, shifted by their offsets.
        length: of the contexts, a power of two.
        shares: of pairs; those that cannot be had (the window alone takes more) are left out.
    """
    part = curves.before(length)
    of_cells = torch.stack([THRESHOLDS.double(), (part.loss[:, 0] / part.queries).sum(dim=0)]).flip(-1)
    pairs = (part.pairs[:, 0] / part.possible).mean(dim=0).flip(0)
    window_loss = F.pad((part.window_loss[:, 0] / part.queries).sum(dim=0), (0, 1))
    window_pairs = F.pad(part.window_pairs[0] / part.possible, (0, 1), value=1.0)
    found = []
    for share in shares:
        if not float(pairs[0]) <= share <= float(pairs[-1]):
            continue
        here, there = (torch.tensor([place_of(share, each)], dtype=torch.float64) for each in (pairs, window_pairs))
        threshold, lost = at_places(of_cells, here).flatten().tolist()
        found.append(DialPoint(threshold, share, lost, float(at_places(window_loss, there))))
    return found
