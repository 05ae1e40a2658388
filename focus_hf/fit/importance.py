"""What dense attention does at some queries, and what leaving keys out would change.

Attention's output at a query is `o = sum_j p_j v_j`. With `G` the gradient of a log-likelihood by that output, an
output `o'` in its place changes the log-likelihood by `G . (o' - o)` to first order, and the mean of its square over
targets drawn from the model's own prediction is the Fisher information in that direction: twice the Kullback-Leibler
divergence of the predictions, to second order (Amari, Natural Gradient Works Efficiently in Learning, 1998; as a
criterion for pruning, Molchanov et al., arXiv 1906.10771). For an attended set `M` of keys no output vector is needed:

    G . (o_M - o) = sum_{j in M} p_j e_j / sum_{j in M} p_j,     e_j = G . (v_j - o)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

#: Score of a pair that is not causal; ``-inf`` would give NaN.
_NEVER = -1e9

#: Scores at a time: they stay in a processor's cache.
_SCORES = 1 << 19


@dataclass(frozen=True)
class HeadWindow:
    """What one KV head and its ``r`` query heads see of one window of ``T`` tokens, float32.

    Args:
        positions: int64 ``(R,)``, ascending: which of the window's queries are looked at.
        queries: ``(r, R, D)``, as they meet keys (positions applied).
        keys: ``(T, D)``, likewise.
        values: ``(T, D_v)``.
        gradients: ``(r, R, D_v)``, of a sampled log-likelihood by attention's output.
        scale: factor on ``q . k``.
        softcap: of the scores, Gemma-2's.
        sink_logits: ``(r,)``, gpt-oss' learned sinks.
    """

    positions: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor
    gradients: Tensor
    scale: float
    softcap: float | None = None
    sink_logits: Tensor | None = None

    def parts(self) -> Iterator[HeadWindow]:
        """Some queries at a time, with the keys before them."""
        count = max(16, _SCORES // len(self.keys))
        for start in range(0, len(self.positions), count):
            rows = slice(start, start + count)
            end = int(self.positions[rows][-1]) + 1
            yield replace(
                self,
                positions=self.positions[rows],
                queries=self.queries[:, rows],
                keys=self.keys[:end],
                values=self.values[:end],
                gradients=self.gradients[:, rows],
            )


@dataclass(frozen=True)
class DenseRows:
    """Dense attention of a KV head at ``R`` queries: how much each key weighs, and what it does to the likelihood.

    Args:
        positions: int64 ``(R,)``.
        weights: ``p``, ``(r, R, T)``; 0 where ``j > i``.
        effects: ``p e``, ``(r, R, T)``; their sum over keys and the learned sink is 0.
        sink_weight: what a learned sink takes of the weight, ``(r, R, 1)``, else 0.
        sink_effect: its effect, likewise.
    """

    positions: Tensor
    weights: Tensor
    effects: Tensor
    sink_weight: Tensor
    sink_effect: Tensor

    @classmethod
    def of(cls, window: HeadWindow) -> DenseRows:
        """Compute scores, weights and effects, each once."""
        scores = torch.matmul(window.queries, window.keys.T).mul_(window.scale)
        if window.softcap is not None:
            scores.div_(window.softcap).tanh_().mul_(window.softcap)
        later = torch.arange(window.keys.shape[0]) > window.positions[:, None]
        scores.masked_fill_(later, _NEVER)
        sink_weight = scores.new_zeros(*scores.shape[:2], 1)
        if window.sink_logits is None:
            weights = torch.softmax(scores, dim=-1)
        else:
            sinks = window.sink_logits[:, None, None].expand_as(sink_weight)
            weights, sink_weight = torch.softmax(torch.cat([scores, sinks], -1), -1).split([scores.shape[-1], 1], -1)
        outputs = torch.matmul(weights, window.values)
        mean_effect = (window.gradients * outputs).sum(dim=-1, keepdim=True)
        effects = torch.matmul(window.gradients, window.values.T).sub_(mean_effect).mul_(weights)
        return cls(window.positions, weights, effects, sink_weight, -mean_effect * sink_weight)

    @property
    def length(self) -> int:
        """``T``."""
        return self.weights.shape[-1]

    def fisher_cost(self, weight: Tensor, effect: Tensor) -> Tensor:
        """Cost of attending to a part of the keys, summed over query heads.

        Args:
            weight: sum of `weights` over the attended keys, ``(r, R, ...)``.
            effect: sum of `effects` over them, likewise.

        Returns:
            ``(R, ...)``.
        """
        shape = (*self.sink_weight.shape[:2], *(1,) * (weight.dim() - 2))
        change = (effect + self.sink_effect.view(shape)) / (weight + self.sink_weight.view(shape))
        return change.square().sum(dim=0)
