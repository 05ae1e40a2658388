"""Heads that read whole bands, the nearest first: for them a window loses less than any choice among groups does.

Some heads take an average of everything before a query, most of them in the first layers. A part of the keys, however
it is chosen, leads such an average astray where a window as large does not, since what is near is like the rest.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ..attention import Pattern
from ..routing.cells import CellRouter
from .curves import HeadCurves

#: Between these shares of pairs windows are compared with cells: what the dial is turned to.
_FROM, _TO = 0.04, 0.5

#: So many times a window's loss have cells to lose before a head goes without groups: little text decides it.
_TIMES = 1.5

#: How much less a pair is worth, as a logarithm, where the threshold of heads that read cells falls by one: about.
_FALL = 1.6

#: Beside what it is added to, nothing.
_NOTHING = 1e-12


def better_as_windows(curves: HeadCurves) -> Tensor:
    """Which heads lose `_TIMES` as much by cells as by windows with as many pairs, on average of the logarithm.

    Returns:
        bool ``(n,)``.
    """
    read, windows = curves.pairs.sum(dim=1), curves.window_pairs.sum(dim=0)
    compared = (windows > _FROM * curves.possible.sum()) & (windows < _TO * curves.possible.sum())
    # The last threshold under which at least as many pairs are read.
    there = torch.searchsorted(-read, -windows[compared].expand(len(read), -1).contiguous(), right=True) - 1
    cells = curves.loss.sum(dim=1).gather(1, there.clamp(min=0))
    ratio = (cells + _NOTHING) / (curves.window_loss.sum(dim=1)[:, compared] + _NOTHING)
    return ratio.log().mean(dim=1) > math.log(_TIMES)


def as_windows(router: CellRouter, heads: Tensor, curves: HeadCurves, pattern: Pattern) -> CellRouter:
    """A router by which some heads read all groups of a band or none, whatever the query.

    The lower the threshold, the more bands they read: each from about where other heads read what is worth as much.

    Args:
        router: of a layer.
        heads: which of its choosers, bool ``(n,)``.
        curves: of all of them.
        pattern: window, sinks and bands.

    Returns:
        float32 numbers that float16 holds.
    """
    loss, pairs = curves.window_loss.sum(dim=1)[heads], curves.window_pairs.sum(dim=0)
    saved = (loss - F.pad(loss[:, 1:], (0, 1))).clamp(min=0)
    worth = saved / (F.pad(pairs[1:], (0, 1), value=float(curves.possible.sum())) - pairs).clamp(min=1)
    worth = (worth / worth.amax(dim=1, keepdim=True).clamp(min=_NOTHING) + _NOTHING).cummin(dim=1).values
    sizes = torch.tensor(pattern.band_starts()).double()  # each band is as long as what comes before it
    shares = torch.softmax(worth.log() / _FALL + sizes.log(), dim=1)  # of what is not near: half of everything
    groups = router.centroids.shape[1]
    bias = (shares / (2 * groups)).log().repeat(1, groups)
    bias = F.pad(bias, (0, 1), value=-math.log(2)).half().float()
    nothing = {name: getattr(router, name).clone() for name in ("query_projection", "band_projection")}
    for tensor in nothing.values():
        tensor[heads] = 0
    return replace(router, **nothing, cell_bias=router.cell_bias.masked_scatter(heads[:, None], bias))
