"""What each head adds to the one threshold, so that pairs go where they save most."""

from __future__ import annotations

import torch
from torch import Tensor

from .curves import STEP, THRESHOLDS, HeadCurves, at_places, place_of

#: Shares of pairs at which heads are compared.
_SHARES = (0.07, 0.1, 0.15, 0.25)

#: Offsets that a head may have, before their mean is taken off: one that loses nothing on the text at hand may lose
#: something on other text.
_CANDIDATES = torch.linspace(-2.5, 2.5, 41, dtype=torch.float64)

#: Times their square, in shares of a head's pairs, is what offsets must be worth: they are estimated from few windows.
_PULL = 0.05

_ROUNDS = 8


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
