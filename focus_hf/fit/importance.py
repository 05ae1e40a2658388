"""What dense attention does at some queries, and what leaving keys out would change.

Attention's output at a query is `o = sum_j p_j v_j`. With `G` the gradient of a log-likelihood by that output, an
output `o'` in its place changes the log-likelihood by `G . (o' - o)` to first order, and the mean of its square over
targets drawn from the model's own prediction is the Fisher information in that direction: twice the Kullback-Leibler
divergence of the predictions, to second order (Amari, Natural Gradient Works Efficiently in Learning, 1998; as a
criterion for pruning, Molchanov et al., arXiv 1906.10771). For an attended set `M` of keys no output vector is needed:

    G . (o_M - o) = sum_{j in M} p_j e_j / sum_{j in M} p_j,     e_j = G . (v_j - o)

Sums go over cells, groups at a distance (`focus_hf.routing.cells`). They are numbered as in `CellRouter.cell_bias`:
group by group, within a group band by band, and last "near", which is the window, the sinks, and whatever comes later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..attention import Pattern

#: Score of a pair that is not causal; ``-inf`` would give NaN.
_NEVER = -1e9

#: Scores at a time: they stay in a processor's cache.
_SCORES = 1 << 19


@dataclass(frozen=True)
class LayerWindow:
    """One attention layer, or one of its KV heads, over one window of ``T`` tokens, float32; ``R`` of its queries.

    Args:
        keys: ``(H_kv, T, D)``, as they meet queries (positions applied).
        plain_keys: ``(H_kv, T, D)``, before rotary positions.
        values: ``(H_kv, T, D_v)``.
        positions: int64 ``(R,)``, ascending: which of the window's queries are looked at.
        queries: ``(H, R, D)``, as they meet keys; ``H = r H_kv``.
        gradients: ``(H, R, D_v)``, of a sampled log-likelihood by attention's output.
        scale: factor on ``q . k``.
        softcap: of the scores, Gemma-2's.
        sink_logits: ``(H,)``, gpt-oss' learned sinks.
    """

    keys: Tensor
    plain_keys: Tensor
    values: Tensor
    positions: Tensor
    queries: Tensor
    gradients: Tensor
    scale: float
    softcap: float | None = None
    sink_logits: Tensor | None = None

    def seen_by(self, choosers: int) -> Iterator[LayerWindow]:
        """What each of so many choosers sees (`focus_hf.routing.cells`): a KV head, and query heads of it."""
        of_keys = ("keys", "plain_keys", "values")
        names = [name for name, value in vars(self).items() if isinstance(value, Tensor) and name != "positions"]
        counts = {name: len(self.keys) if name in of_keys else choosers for name in names}
        for number in range(choosers):
            parts = {name: getattr(self, name).chunk(n)[number * n // choosers] for name, n in counts.items()}
            yield replace(self, **parts)

    def parts(self) -> Iterator[LayerWindow]:
        """Some queries at a time, with the keys before them."""
        count = max(16, _SCORES // self.keys.shape[1])
        for start in range(0, len(self.positions), count):
            rows = slice(start, start + count)
            end = int(self.positions[rows][-1]) + 1
            before = {name: getattr(self, name)[:, :end] for name in ("keys", "plain_keys", "values")}
            here = {name: getattr(self, name)[:, rows] for name in ("queries", "gradients")}
            yield replace(self, positions=self.positions[rows], **before, **here)


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
    def of(cls, window: LayerWindow) -> DenseRows:
        """Compute scores, weights and effects of one KV head, each once."""
        (keys,), (values,) = window.keys, window.values
        scores = torch.matmul(window.queries, keys.T).mul_(window.scale)
        if window.softcap is not None:
            scores.div_(window.softcap).tanh_().mul_(window.softcap)
        later = torch.arange(len(keys)) > window.positions[:, None]
        scores.masked_fill_(later, _NEVER)
        sink_weight = scores.new_zeros(*scores.shape[:2], 1)
        if window.sink_logits is None:
            weights = torch.softmax(scores, dim=-1)
        else:
            sinks = window.sink_logits[:, None, None].expand_as(sink_weight)
            weights, sink_weight = torch.softmax(torch.cat([scores, sinks], -1), -1).split([len(keys), 1], -1)
        outputs = torch.matmul(weights, values)
        mean_effect = (window.gradients * outputs).sum(dim=-1, keepdim=True)
        effects = torch.matmul(window.gradients, values.T).sub_(mean_effect).mul_(weights)
        return cls(window.positions, weights, effects, sink_weight, -mean_effect * sink_weight)

    @property
    def length(self) -> int:
        """``T``."""
        return self.weights.shape[-1]


def cells_of_keys(groups: Tensor, positions: Tensor, pattern: Pattern, num_groups: int) -> Tensor:
    """The cell of each key, as each query sees it.

    Args:
        groups: integers ``(T,)``.
        positions: of the queries, int64 ``(R,)``.
        pattern: window, sinks and bands.
        num_groups: ``K``.

    Returns:
        int64 ``(R, T)``.
    """
    near, length, last = num_groups * pattern.num_bands, len(groups), int(positions.max())
    # Bands of distance, -1 for near: rows that are cut out of one table.
    table = torch.bucketize(torch.arange(last, -length, -1), torch.tensor(pattern.band_starts())) - 1
    bands = table.unfold(0, length, 1)[last - positions]
    cells = torch.where(bands < 0, near, groups.long() * pattern.num_bands + bands)
    cells[:, : pattern.sink_tokens] = near
    return cells


def sums_by_cell(values: Tensor, cells: Tensor, num_cells: int) -> Tensor:
    """Sums over the keys of each cell: ``(..., R, T)`` to ``(..., R, cells)``."""
    sums = values.new_zeros(*values.shape[:-1], num_cells)
    return sums.scatter_add_(-1, cells.expand_as(values), values)


def cell_importance(window: LayerWindow, groups: Tensor, pattern: Pattern, num_groups: int) -> Tensor:
    """``sum_j p_j |e_j|`` over the keys of each cell and over query heads: ``(R, K * bands + 1)``."""
    found = []
    for rows in map(DenseRows.of, window.parts()):
        cells = cells_of_keys(groups[: rows.length], rows.positions, pattern, num_groups)
        found.append(sums_by_cell(rows.effects.abs().sum(dim=0), cells, num_groups * pattern.num_bands + 1))
    return torch.cat(found)
