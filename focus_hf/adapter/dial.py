"""The dial of routing by cells: from a share of pairs to the thresholds above which cells are read.

The curves of an adapter say, at several positions, which share of the earlier tokens a query there attends to under
which threshold. A query's threshold then follows from the share that is asked for and its own position, so that any
context attends to that share of its pairs, and a token's routing does not depend on how many come after it. Beyond the
octave of the last curve thresholds go on falling with every doubling as they did between the last two.

A share of its own for answers is for the last tokens of every call: those of a prompt, where its question
stands, and each token that is generated. What few tokens read costs little, and is what an answer is made of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..routing.cells import cell_limits, finest
from ..settings import FocusSettings

#: Reads all cells.
EVERYTHING = -1e6

#: So many of the last tokens of a call are, or ask for, an answer.
ANSWER_TOKENS = 64

#: From the middle of an octave, where its curve stands, to its end; in doublings.
HALF_OCTAVE = math.log2(4 / 3)

#: The logarithm of a position, and the thresholds and shares there.
_Curve = tuple[float, Sequence[Sequence[float]]]


def thresholds(settings: FocusSettings, positions: Tensor) -> Tensor | float:
    """The threshold of queries at positions, integers ``(B, Q)``, negative for padding: float32 ``(B, Q)``, or one
    number for all, where answers have no share of their own.
    """
    return settings.threshold if settings.pairs is None else _thresholds_of(settings, settings.pairs, positions)


def _thresholds_of(settings: FocusSettings, share: float, positions: Tensor) -> Tensor | float:
    if share >= 1 or not settings.pairs_curves:
        return EVERYTHING if share >= 1 else settings.threshold
    at, values = _thresholds_at_curves(settings, share, positions.device)
    places = positions.clamp(min=1).to(at.dtype).log2()
    upper = torch.searchsorted(at, places).clamp(max=len(at) - 1)
    lower = (upper - 1).clamp(min=0)
    part = ((places - at[lower]) / (at[upper] - at[lower]).clamp(min=1e-9)).clamp(0, 1)
    beyond, last, at_last = (places - at[-1] - HALF_OCTAVE).clamp(min=0), values[-2:], at[-2:]
    falls = ((last[-1] - last[0]) / (at_last[-1] - at_last[0]).clamp(min=1e-9)).clamp(max=0)  # in a doubling
    return (torch.lerp(values[lower], values[upper], part) + beyond * falls).float()


def _thresholds_at_curves(settings: FocusSettings, share: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Logarithms of the positions of curves, and the thresholds for a share there: ``(curves,)`` each, made once."""
    curves = settings.pairs_curves or {}
    slots = {} if torch.compiler.is_compiling() else vars(settings).setdefault("_at_curves", {})
    kept = slots.get((device, share))
    if kept is None or kept[0] != curves:
        ascending = sorted((math.log2(int(position)), points) for position, points in curves.items())
        numbers = [(place, _interpolate([(s, t) for t, s in points], share)) for place, points in ascending]
        with torch.inference_mode(False):
            kept = curves, torch.tensor(numbers, dtype=finest(device), device=device).T.contiguous()
        slots[device, share] = kept
    at, values = kept[1]
    return at, values


def limits(settings: FocusSettings, positions: Tensor, answer_pairs: float | None = None) -> Tensor:
    """`focus_hf.routing.cells.cell_limits` of a call's queries: float32 ``(B, Q, bands)``; see `thresholds`.

    Args:
        settings: of the adapter.
        positions: integers ``(B, Q)``, negative for padding.
        answer_pairs: the share of the last `ANSWER_TOKENS` of them, where they have one of their own.
    """
    at = thresholds(settings, positions)
    if answer_pairs is not None:
        count = positions.shape[1]
        last = torch.arange(count, device=positions.device)[None] >= count - ANSWER_TOKENS
        at = torch.where(last, _thresholds_of(settings, answer_pairs, positions), at)
    return cell_limits(positions, at, settings.local_window, settings.num_bands)


def limits_from(
    settings: FocusSettings, first: int, count: int, device: torch.device, answer_pairs: float | None = None
) -> Tensor:
    """The same of consecutive queries, float32 ``(1, count, bands)``: all layers ask it, and it is made once."""
    dial = settings.threshold, settings.pairs, settings.pairs_curves, settings.local_window, settings.num_bands
    asked = (*dial, first, count, device, answer_pairs)
    kept = vars(settings).get("_limits")
    if kept is None or kept[0] != asked:
        with torch.inference_mode(False):
            kept = asked, limits(settings, torch.arange(first, first + count, device=device)[None], answer_pairs)
        vars(settings)["_limits"] = kept
    found: Tensor = kept[1]
    return found


def share_at(curves: Mapping[str, Sequence[Sequence[float]]], length: int, threshold: float) -> float:
    """The share of pairs that a context attends to under one threshold for all of its tokens.

    Args:
        curves: of the adapter, see `FocusConfig`.
        length: tokens of the context.
        threshold: the dial.
    """
    at = sorted((math.log2(int(position)), points) for position, points in curves.items())
    known = [(place, _share(points, threshold)) for place, points in at]
    positions = [(i + 0.5) * length / 256 for i in range(256)]
    total = 0.0
    for position in positions:
        place = math.log2(max(position, 1.0))
        beyond = place - at[-1][0] - HALF_OCTAVE
        if beyond > 0 and len(at) > 1:
            share = _share(_curve_beyond(at[-2], at[-1], beyond), threshold)
        else:
            share = _interpolate(known, place)
        total += position * share
    return total / sum(positions)


def _curve_beyond(before: _Curve, last: _Curve, beyond: float) -> list[tuple[float, float]]:
    """The curve so many doublings beyond the octave of the last one."""
    (place, points), earlier = last, [(s, t) for t, s in before[1]]
    falls = [min((t - _interpolate(earlier, s)) / (place - before[0]), 0.0) for t, s in points]
    return [(t + beyond * fall, s) for (t, s), fall in zip(points, falls, strict=True)]


def threshold_for(curves: Mapping[str, Sequence[Sequence[float]]], length: int, share: float) -> float:
    """The one threshold under which a context of this length attends to a share of its pairs; see `share_at`."""
    every = sorted(point[0] for points in curves.values() for point in points)
    low, high = every[0] - 100.0, every[-1] + 1.0  # beyond the curves thresholds are lower
    for _ in range(50):
        middle = (low + high) / 2
        if share_at(curves, length, middle) > share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _share(points: Sequence[Sequence[float]], threshold: float) -> float:
    """The share under a threshold, by a curve of ``[threshold, share]`` whose thresholds fall."""
    return _interpolate([(-t, s) for t, s in points], -threshold)


def _interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """Piecewise linear through points that ascend, constant beyond them."""
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / max(x1 - x0, 1e-12)
    return points[-1][1]
