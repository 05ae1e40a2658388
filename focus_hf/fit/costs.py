"""What every way of attending costs a KV head: in the model's predictions, and in pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .importance import DenseRows


@dataclass(frozen=True)
class Option:
    """A way for a head to attend.

    Args:
        local_window: distance up to which all pairs are attended; ``None``: everything is.
        top_k: groups that a query reads; 0: none, window and sinks only.
    """

    local_window: int | None
    top_k: int = 0

    def pattern(self) -> dict[str, int | str]:
        """As it stands in ``head_patterns``."""
        if self.local_window is None:
            return {"attend": "everything"}
        if not self.top_k:
            return {"attend": "window", "local_window": self.local_window}
        return {"attend": "groups", "local_window": self.local_window, "top_k": self.top_k}


EVERYTHING = Option(None)


@dataclass(frozen=True)
class Cost:
    """Of one option at one head.

    Args:
        loss: estimate of what it adds to the divergence from dense predictions, in nats per token: half the Fisher
            cost (see `importance`).
        pairs: share of all causal pairs that are attended.
    """

    loss: float
    pairs: float


def option_costs(
    rows: DenseRows, options: Sequence[Option], sink_tokens: int, key_groups: Tensor, query_scores: Tensor
) -> dict[Option, tuple[float, float]]:
    """Sums over some queries of one window, for all options in one pass.

    Args:
        rows: dense attention of the head at these queries.
        options: to be measured; `EVERYTHING` costs nothing and is passed over.
        sink_tokens: first tokens that every query reads.
        key_groups: int64 ``(T,)``.
        query_scores: ``(R, K)``: a query reads its ``top_k`` best.

    Returns:
        For each option the sum of Fisher costs and the number of pairs.
    """
    near = _NearSums.of(rows, sink_tokens)
    far = _GroupSums.of(rows, sink_tokens, key_groups, query_scores)
    found: dict[Option, tuple[float, float]] = {}
    for window in sorted({option.local_window for option in options if option.local_window is not None}):
        weight, effect, pairs = near.within(window)
        wanted = {option.top_k: option for option in options if option.local_window == window}
        if 0 in wanted:
            found[wanted.pop(0)] = float(rows.fisher_cost(weight, effect).sum()), float(pairs.sum())
        if wanted:
            read_weight, read_effect, read_pairs = far.beyond(window)
            cost = rows.fisher_cost(weight[..., None] + read_weight, effect[..., None] + read_effect).sum(dim=0)
            count = (pairs[:, None] + read_pairs).sum(dim=0)
            for top_k, option in wanted.items():
                found[option] = float(cost[top_k - 1]), float(count[top_k - 1])
    return found


@dataclass(frozen=True)
class _NearSums:
    """Running sums along the keys, from which the sums over any window are differences."""

    positions: Tensor
    weights: Tensor
    effects: Tensor
    sink_tokens: int

    @classmethod
    def of(cls, rows: DenseRows, sink_tokens: int) -> _NearSums:
        return cls(rows.positions, _running(rows.weights), _running(rows.effects), sink_tokens)

    def within(self, window: int) -> tuple[Tensor, Tensor, Tensor]:
        """Weight ``(r, R)``, effect ``(r, R)`` and pairs ``(R,)`` of window and sinks."""
        first = (self.positions - window).clamp(min=0)
        sinks = first.clamp(max=self.sink_tokens)  # those that are not in the window anyhow
        end = self.positions + 1

        def over(sums: Tensor) -> Tensor:
            at = [sums.gather(-1, index.expand(sums.shape[0], -1)[..., None])[..., 0] for index in (end, first, sinks)]
            return at[0] - at[1] + at[2]

        return over(self.weights), over(self.effects), end - first + sinks


def _running(values: Tensor) -> Tensor:
    """``(r, R, T)`` to ``(r, R, T + 1)``, sums of the first 0, 1, ... T keys."""
    return F.pad(values.cumsum(dim=-1), (1, 0))


class _GroupSums:
    """Sums over the keys of each group beyond a window that grows: what leaves is taken away."""

    def __init__(self, values: Tensor, positions: Tensor, sink_tokens: int, key_groups: Tensor, order: Tensor) -> None:
        """Sums over all keys but sinks.

        Args:
            values: ``(N, R, T)``: what to sum, 0 where ``j > i``.
            positions, sink_tokens, key_groups: see `option_costs`.
            order: ``(R, K)``, a query's groups from the best to the worst.
        """
        self._values, self._positions, self._sinks = values, positions, sink_tokens
        self._groups, self._order = key_groups, order
        members = F.one_hot(key_groups, order.shape[-1]).to(values.dtype)
        self._sums = values[..., sink_tokens:] @ members[sink_tokens:]
        self._window = -1

    @classmethod
    def of(cls, rows: DenseRows, sink_tokens: int, key_groups: Tensor, query_scores: Tensor) -> _GroupSums:
        pairs = (torch.arange(rows.length) <= rows.positions[:, None])[None]
        values = torch.cat([rows.weights, rows.effects, pairs.to(rows.weights.dtype)])
        order = query_scores.argsort(dim=-1, descending=True)
        return cls(values, rows.positions, sink_tokens, key_groups, order)

    def beyond(self, window: int) -> tuple[Tensor, Tensor, Tensor]:
        """Weight ``(r, R, K)``, effect ``(r, R, K)`` and pairs ``(R, K)`` of the keys beyond the window in the first
        1, 2, ... K groups of each query. Windows must be asked for in ascending order.
        """
        keys = self._positions[:, None] - torch.arange(self._window + 1, window + 1)
        leaving = self._values.gather(-1, keys.clamp(min=0).expand(len(self._values), -1, -1))
        leaving = leaving * (keys >= self._sinks)
        members = F.one_hot(self._groups[keys.clamp(min=0)], self._order.shape[-1]).to(leaving.dtype)
        self._sums = self._sums - torch.einsum("nrd,rdk->nrk", leaving, members)
        self._window = window
        read = self._sums.gather(-1, self._order.expand_as(self._sums)).cumsum(dim=-1)
        heads = len(read) // 2
        return read[:heads], read[heads:-1], read[-1]
