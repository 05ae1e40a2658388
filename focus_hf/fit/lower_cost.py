"""Queries taught by the cost itself: what they lose by what they do not read, and what they pay for what they read.

`query_router` ranks cells by how much each matters alone. What is left out adds up with signs, though, and weighs
against what is read: from there on half the Fisher cost (`importance`) is the aim, plus a price times pairs, with the
thresholds that read several shares of the pairs. Cells are read by a sigmoid in place of a step, which has no slope.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..attention import Pattern
from ..routing.cells import CellRouter, key_groups
from .curves import STEP, THRESHOLDS, above_thresholds, cost_of, log_sizes, place_of, scores_of, sums_of
from .importance import DenseRows, LayerWindow
from .minimize import BATCH, minimize

#: Shares of the pairs whose thresholds are taught, and how many of them in a step.
_SHARES, _AT_ONCE = (0.03, 0.05, 0.08, 0.13, 0.2, 0.32, 0.5), 2

#: How far, in nats, a score is from the threshold where the sigmoid is at 73 %.
_WIDTH = 0.5

_LEARNING_RATE = 0.003  # for queries of size 1; ten times that for biases

#: Queries by which prices are found, and how far apart, in places of `THRESHOLDS`, the two thresholds are.
_SAMPLE, _APART = 4096, round(0.5 / STEP)

_NOTHING = 1e-12


@dataclass(frozen=True)
class _Queries:
    """``N`` queries of a chooser.

    Args:
        queries: ``(r, N, D)``.
        sizes: `log_sizes`, ``(N, bands)``.
        sums: `sums_of`, ``(2r + 1, N, cells)``.
    """

    queries: Tensor
    sizes: Tensor
    sums: Tensor

    @classmethod
    def of(cls, windows: Iterable[LayerWindow], router: CellRouter, pattern: Pattern) -> _Queries:
        queries, sizes, sums, cells = [], [], [], router.cell_bias.shape[-1]
        for window in windows:
            groups = key_groups(window.plain_keys[None], router)[0, 0]
            sums += [sums_of(rows, groups, pattern, cells) for rows in map(DenseRows.of, window.parts())]
            queries.append(window.queries)
            sizes.append(log_sizes(window.positions, pattern))
        return cls(torch.cat(queries, dim=1), torch.cat(sizes), torch.cat(sums, dim=1))

    def some(self, rows: Tensor) -> _Queries:
        return _Queries(self.queries[:, rows], self.sizes[rows], self.sums[:, rows])

    def scores(self, router: CellRouter) -> Tensor:
        return scores_of(self.queries, self.sizes, router)[0]


@dataclass(frozen=True)
class _Aim:
    """What a threshold is taught: a price of a pair, and the sum of cost and price at first, which counts as 1."""

    threshold: float
    price: float
    sum: float


def lower_cost(
    router: CellRouter,
    windows: Sequence[LayerWindow],
    pattern: Pattern,
    often: Tensor,
    steps: int,
    generator: torch.Generator,
) -> CellRouter:
    """Fit what judges queries by what reading costs and what it saves; groups stay as they are.

    Costs count as their logarithm beyond the mean cost of a window alone: a few queries cost a thousand times as much
    as others.

    Args:
        router: of a key/value head and its choosers, trained by `train_query_router`.
        windows: of that head.
        pattern: window, sinks and bands.
        often: how often each query is to be drawn, beside the others: float ``(N,)``.
        steps: of Adam, with cosine decay.
        generator: of the batches.

    Returns:
        The router, float32 numbers that float16 holds. A chooser to whom windows of these lengths leave nothing to
        choose stays as it was.
    """
    names = ("query_projection", "band_projection", "cell_bias", "offset")
    choosers = len(router.offset)
    parts = ({name: getattr(router, name)[n : n + 1] for name in names} for n in range(choosers))
    views = zip(*(window.seen_by(choosers) for window in windows), strict=True)
    found = [
        _lower(replace(router, **part), seen, pattern, often, steps, generator)
        for part, seen in zip(parts, views, strict=True)
    ]
    return replace(router, **{name: torch.cat([getattr(each, name) for each in found]) for name in names})


def _lower(
    router: CellRouter,
    windows: Iterable[LayerWindow],
    pattern: Pattern,
    often: Tensor,
    steps: int,
    generator: torch.Generator,
) -> CellRouter:
    """The same of one chooser, and what it sees."""
    data = _Queries.of(windows, router, pattern)
    sample = data.some(often.multinomial(_SAMPLE, replacement=True, generator=generator))
    limit = float(cost_of(sample.sums[..., -1])[0].mean())
    aims = _aims(sample, router, limit)
    if not aims:
        return router
    spread = (data.queries - data.queries.mean(dim=1, keepdim=True)).square().mean().sqrt().clamp(min=_NOTHING)
    rates = {"query_projection": 1 / float(spread), "band_projection": 1 / float(spread), "cell_bias": 10.0}
    learnt = {name: getattr(router, name).clone() for name in rates}

    def loss() -> Tensor:
        some = data.some(often.multinomial(BATCH, replacement=True, generator=generator))
        scores, total = some.scores(replace(router, **learnt)), torch.zeros(())
        for number in torch.randperm(len(aims), generator=generator)[:_AT_ONCE].tolist():
            aim = aims[number]
            read = torch.sigmoid((scores - aim.threshold) / _WIDTH)
            cost, pairs = cost_of(some.sums[..., -1] + torch.einsum("nrc,rc->nr", some.sums[..., :-1], read))
            total = total + (_damped(cost, limit).mean() + aim.price * pairs.mean()) / aim.sum
        return total

    minimize(loss, {learnt[name]: rate * _LEARNING_RATE for name, rate in rates.items()}, steps)
    return replace(router, **{name: tensor.detach().half().float() for name, tensor in learnt.items()})


def _damped(cost: Tensor, limit: float) -> Tensor:
    return limit * torch.log1p(cost / limit)


def _aims(sample: _Queries, router: CellRouter, limit: float) -> list[_Aim]:
    """For each share of pairs that can be had the threshold, and what a pair more or less there is worth."""
    if not limit > 0:
        return []
    cost, pairs = cost_of(above_thresholds(sample.sums, sample.scores(router)))
    cost, pairs = _damped(cost, limit).mean(dim=0), pairs.mean(dim=0)
    possible = float(sample.sums[-1].sum(dim=-1).mean())
    found = []
    for share in _SHARES:
        if float(pairs[-1]) < share * possible < float(pairs[0]):
            place = len(THRESHOLDS) - 1 - round(place_of(share * possible, pairs.flip(0)))
            more, less = max(0, place - _APART), min(len(THRESHOLDS) - 1, place + _APART)
            price = float((cost[less] - cost[more]) / (pairs[more] - pairs[less]).clamp(min=_NOTHING))
            if price > 0:
                found.append(_Aim(float(THRESHOLDS[place]), price, float(cost[place] + price * pairs[place])))
    return found
