"""What distant attention is used for: how far each group looks, and which pairs of tokens meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ..adapter import HeadView, Router, final_scores, groups_read, observe_attention, observe_routing
from ..attention import Pattern, WhoAttends, attended_pairs
from ..evaluate.modes import Mode, attending, device_of
from .collect import Window

#: Pairs kept of each layer.
PAIRS = 5


@dataclass(frozen=True)
class DistantPair:
    """Two tokens far from each other that attend because they share a group.

    Args:
        weight: attention weight, mean over heads.
        window: which window.
        query, key: places in it.
        group: the shared group.
        affinity: ``g_i . g_j`` of the two tokens' group probabilities, 0 to 1: how sure it is that they share one; of
            a head that routes by itself, the probability that the key is in a group which the query reads.
    """

    weight: float
    window: int
    query: int
    key: int
    group: int
    affinity: float


@dataclass
class DistantAttention:
    """Of one layer.

    Args:
        share: for each group, the share of its tokens' attention that goes to distant tokens.
        distance: for each group, the mean distance of that attention, in tokens; 0 if there is none.
        pairs: those with the largest weight times affinity, at most one for each query.
        overall: share of all tokens' attention that goes to distant tokens.
    """

    share: list[float]
    distance: list[float]
    pairs: list[DistantPair]
    overall: float = 0.0


def distant_attention(model: nn.Module, windows: Sequence[Window]) -> dict[str, DistantAttention]:
    """Look at the attention weights of some windows; spells out ``H x T x T`` weights of one layer at a time.

    Distant pairs are those outside the local window that do not lead to a sink.

    Args:
        model: with an active Focus adapter.
        windows: a few; those that are short enough for dense attention tell nothing.

    Returns:
        By layer name; empty if every window was too short.
    """
    sums: dict[str, np.ndarray] = {}  # rows: weight, distant weight, distant weight times distance; columns: groups
    best: dict[str, list[tuple[float, DistantPair]]] = {}
    probabilities: dict[Router, Tensor] = {}
    number = 0

    def note(router: Router, scores: Tensor, memberships: Tensor) -> None:
        probabilities[router] = torch.softmax(final_scores(router, scores[0]), dim=-1)

    def look(router: Router, query: Tensor, key: Tensor, scale: float, memberships: Tensor) -> None:
        pattern, reads = router.pattern, groups_read(router, memberships)
        weights = _weights(query[0], key[0], scale, pattern, memberships, reads)
        positions = torch.arange(query.shape[2], device=query.device)
        gap = positions[:, None] - positions[None]
        distant = weights * ((gap > pattern.local_window) & (positions[None] >= pattern.sink_tokens))
        group = probabilities[router].argmax(dim=-1)  # a token's first group, as everywhere in a report
        rows = torch.stack([weights.sum(-1), distant.sum(-1), (distant * gap).sum(-1)])
        members = torch.nn.functional.one_hot(group, memberships.shape[-1]).to(rows.dtype)
        sums[router.name] = sums.get(router.name, 0) + (rows @ members).cpu().numpy()
        asked = reads[0].float() if isinstance(router, HeadView) else probabilities[router]
        affinity = asked @ probabilities[router].T
        rank, keys = (distant * affinity).max(dim=-1)
        kept = best.setdefault(router.name, [])
        for place in rank.topk(min(PAIRS, len(rank))).indices.tolist():
            other = int(keys[place])
            shared = reads[0, place] & memberships[0, other]
            if bool(shared.any()):
                weight, near = float(distant[place, other]), float(affinity[place, other])
                pair = DistantPair(weight, number, place, other, int(shared.float().argmax()), near)
                kept.append((float(rank[place]), pair))
        kept.sort(key=lambda item: -item[0])
        del kept[PAIRS:]

    with (
        attending(model, Mode("hard")),
        observe_routing(model, note),
        observe_attention(model, look),
        torch.no_grad(),
    ):
        for number, window in enumerate(windows):  # noqa: B007  (the observer reads it)
            model(input_ids=window.ids[None].to(device_of(model)), use_cache=False)
    return {
        name: DistantAttention(
            share=(table[1] / np.maximum(table[0], 1e-12)).tolist(),
            distance=np.where(table[1] > 0, table[2] / np.maximum(table[1], 1e-12), 0.0).tolist(),
            pairs=[pair for _, pair in best[name]],
            overall=float(table[1].sum() / max(table[0].sum(), 1e-12)),
        )
        for name, table in sums.items()
    }


def _weights(query: Tensor, key: Tensor, scale: float, pattern: Pattern, memberships: Tensor, reads: Tensor) -> Tensor:
    """Attention weights ``(T, T)``, mean over heads."""
    positions = torch.arange(query.shape[1], device=query.device)[None]
    allowed = attended_pairs(WhoAttends(pattern, positions, memberships, reads=reads))[0, 0]
    heads = query.shape[0] // key.shape[0]
    total = query.new_zeros(allowed.shape, dtype=torch.float32)
    for head in range(query.shape[0]):
        scores = (query[head].float() @ key[head // heads].float().T) * scale
        total += scores.masked_fill(~allowed, float("-inf")).softmax(dim=-1)
    return total / query.shape[0]
