"""The dial of a fitted adapter: offsets that make heads comparable, curves of pairs, and what is lost at a share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .curves import OCTAVES, THRESHOLDS, HeadCurves

#: Largest offset: a head that loses nothing on the text at hand may lose something on other text.
_FARTHEST = 2.5

#: How much of what a head chose is kept: it is estimated from few windows.
_KEPT = 0.75

#: Shares of pairs under which heads are compared.
_SHARES = (0.1, 0.15, 0.25)

#: Of an octave whose share of pairs the dial changes by less there is no curve.
_LEAST = 0.05

#: Points of a curve of pairs.
_POINTS = 24


def offsets(curves: HeadCurves) -> Tensor:
    """What each head adds to the threshold, so that under one threshold the last pair of every head saves as much.

    For a share of pairs there is a price of a pair under which heads that choose for themselves (each the threshold
    with the smallest loss plus price times pairs) attend to that share. An offset is what a head chose less what heads
    chose on average, averaged over a few shares and drawn towards 0.

    Args:
        curves: of all heads.

    Returns:
        float32 ``(n,)``, that float16 holds.
    """
    loss = curves.loss.sum(dim=1) / curves.queries.sum()
    pairs = curves.pairs.sum(dim=1) / curves.possible.sum()
    chosen = torch.stack([THRESHOLDS[_choose(loss, pairs, share)] for share in _SHARES])
    found = _KEPT * (chosen - chosen.mean(dim=1, keepdim=True)).mean(dim=0)
    return found.clamp(-_FARTHEST, _FARTHEST).half().float()


def _choose(loss: Tensor, pairs: Tensor, share: float) -> Tensor:
    """The place of each head's threshold, under the price that leaves a share of pairs."""
    low, high = -40.0, 20.0  # of the price's logarithm
    for _ in range(40):
        middle = (low + high) / 2
        chosen = (loss + 2.0**middle * pairs).argmin(dim=1)
        too_many = float(pairs.gather(1, chosen[:, None]).mean()) > share
        low, high = (middle, high) if too_many else (low, middle)
    return chosen


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
    thresholds = THRESHOLDS.double().flip(0)
    loss = (part.loss[:, 0] / part.queries).sum(dim=0).flip(0)
    pairs = (part.pairs[:, 0] / part.possible).mean(dim=0).flip(0)
    window_loss = F.pad((part.window_loss[:, 0] / part.queries).sum(dim=0), (0, 1))
    window_pairs = F.pad(part.window_pairs[0] / part.possible, (0, 1), value=1.0)
    found = []
    for share in shares:
        if not float(pairs[0]) <= share <= float(pairs[-1]):
            continue
        here, there = _place(pairs, share), _place(window_pairs, share)
        found.append(DialPoint(_at(thresholds, here), share, _at(loss, here), _at(window_loss, there)))
    return found


def _place(ascending: Tensor, value: float) -> float:
    """Where a value is among those of an ascending list, such as 3.5."""
    upper = int(torch.searchsorted(ascending, value).clamp(1, len(ascending) - 1))
    low, high = float(ascending[upper - 1]), float(ascending[upper])
    return upper - 1 + min(1.0, max(0.0, (value - low) / max(high - low, 1e-12)))


def _at(values: Tensor, place: float) -> float:
    """The value at a place, linear between those of a list."""
    lower = min(int(place), len(values) - 2)
    return float(torch.lerp(values[lower], values[lower + 1], place - lower))
