"""The dial of a fitted adapter: one threshold, what each head adds to it, curves of pairs, what is lost at a share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .curves import OCTAVES, STEP, THRESHOLDS, HeadCurves, at_places, place_of

#: Shares of pairs at which heads are compared.
_SHARES = (0.07, 0.1, 0.15, 0.25)

#: Offsets that a head may have, before their mean is taken off: one that loses nothing on the text at hand may lose
#: something on other text.
_CANDIDATES = torch.linspace(-2.5, 2.5, 41, dtype=torch.float64)

#: Times their square, in shares of a head's pairs, is what offsets must be worth: they are estimated from few windows.
_PULL = 0.05

_ROUNDS = 8

#: Of an octave whose share of pairs the dial changes by less there is no curve.
_LEAST = 0.05

#: Points of a curve of pairs.
_POINTS = 24

#: Share of a model's layers below which routing them can save little.
_FEW = 0.5


def offsets(curves: HeadCurves) -> Tensor:
    """What each head adds to the threshold.

    A share of pairs has a price of a pair: that under which heads that choose for themselves (each the threshold with
    the smallest loss plus price times pairs) attend to that share. An offset is the one under which a head's loss plus
    price times pairs is least, at the common threshold of that share, over a few shares together. Not every head loses
    less the more it reads (one that takes an average of everything is led astray by a part of it), so what an offset
    does at all of these thresholds counts, and not where the best ones are.

    Args:
        curves: of all heads.

    Returns:
        float32 ``(n,)``, that float16 holds; 0 on average.
    """
    loss, pairs = curves.loss.sum(dim=1) / curves.queries.sum(), curves.pairs.sum(dim=1) / curves.possible.sum()
    least = 1.05 * float(pairs[:, -1].mean())  # a window takes that much
    prices = {share: _price(loss, pairs, share) for share in _SHARES if share > least}
    lowest = max(prices.values(), default=0.0) / 1000  # where pairs are left over, they are not free
    places, steps = torch.arange(len(THRESHOLDS)).double(), _CANDIDATES / STEP
    found = torch.zeros(len(loss), dtype=torch.float64)
    for _ in range(_ROUNDS):
        shares = at_places(pairs, places + found[:, None] / STEP).mean(dim=0).flip(0)
        worth = (_PULL * _CANDIDATES.square()).expand(len(loss), -1)
        for share, price in prices.items():
            there = len(THRESHOLDS) - 1 - place_of(share, shares) + steps
            worth = worth + at_places(loss, there) / max(price, lowest) + at_places(pairs, there)
        found = _CANDIDATES[worth.argmin(dim=1)]
        found = found - found.mean()
    return found.half().float()


def _price(loss: Tensor, pairs: Tensor, share: float) -> float:
    """The price of a pair under which heads that choose for themselves attend to a share of the pairs."""
    low, high = -40.0, 20.0  # of its logarithm
    for _ in range(40):
        middle = (low + high) / 2
        chosen = (loss + 2.0**middle * pairs).argmin(dim=1)
        too_many = float(pairs.gather(1, chosen[:, None]).mean()) > share
        low, high = (middle, high) if too_many else (low, middle)
    return float(2.0 ** ((low + high) / 2))


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


def nearest(points: Sequence[DialPoint], pairs: float) -> DialPoint | None:
    """The point whose share of pairs is nearest; ``None`` if there is no point."""
    return min(points, key=lambda point: abs(point.pairs - pairs), default=None)


def afterwards(told: Mapping[int, Sequence[DialPoint]], pairs: float, layers: tuple[int, int]) -> list[str]:
    """What came out of a fit, a sentence each.

    Args:
        told: points of the dial by length of context.
        pairs: the share of pairs that the adapter starts with.
        layers: routed, and in the model.
    """
    said = []
    for length, points in sorted(told.items()):
        if point := nearest(points, pairs):
            said.append(
                f"At {length:,} tokens, with {point.pairs:.0%} of the pairs, it loses about {per_cent(point.loss)} of "
                f"perplexity by its own estimate; a window and the first tokens with as many pairs would lose about "
                f"{per_cent(point.window_loss)}."
            )
    routed, all_layers = layers
    if routed < _FEW * all_layers:
        said.append(
            f"Only {routed} of the model's {all_layers} layers attend to everything and can be routed: the others are "
            "as they were, and little of the whole model's time can be saved."
        )
    return said


def per_cent(loss: float) -> str:
    """A loss in nats per token as a share of perplexity."""
    if loss > math.log(10):
        return "more than 900 %"
    share = 100 * math.expm1(loss)
    return f"{share:.1f} %" if share < 10 else f"{share:.0f} %"
