"""What distant attention is used for: how far each group looks, and which pairs of tokens meet."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ..adapter import FocusLayer, observe_attention
from ..attention import Pattern, attended_pairs
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
    """

    weight: float
    window: int
    query: int
    key: int
    group: int


@dataclass
class DistantAttention:
    """Of one layer.

    Args:
        share: for each group, the share of its tokens' attention that goes to distant tokens.
        distance: for each group, the mean distance of that attention, in tokens; 0 if there is none.
        pairs: the heaviest pairs, at most one for each query.
    """

    share: list[float]
    distance: list[float]
    pairs: list[DistantPair]


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
    heaviest: dict[str, list[tuple[float, int, int, int, int]]] = {}
    number = 0

    def look(layer: FocusLayer, query: Tensor, key: Tensor, scale: float, memberships: Tensor) -> None:
        config = layer.routing_config
        pattern = Pattern(config.local_window, config.sink_tokens, config.dense_below)
        weights = _weights(query[0], key[0], scale, pattern, memberships)
        positions = torch.arange(query.shape[2], device=query.device)
        gap = positions[:, None] - positions[None]
        distant = weights * ((gap > config.local_window) & (positions[None] >= config.sink_tokens))
        group = memberships[0].float().argmax(dim=-1)
        rows = torch.stack([weights.sum(-1), distant.sum(-1), (distant * gap).sum(-1)])
        members = torch.nn.functional.one_hot(group, memberships.shape[-1]).to(rows.dtype)
        sums[layer.name] = sums.get(layer.name, 0) + (rows @ members).cpu().numpy()
        best, keys = distant.max(dim=-1)
        kept = heaviest.setdefault(layer.name, [])
        for place in best.topk(min(PAIRS, len(best))).indices.tolist():
            other = int(keys[place])
            shared = memberships[0, place] & memberships[0, other]
            if bool(shared.any()):
                item = (float(best[place]), number, place, other, int(shared.float().argmax()))
                heapq.heappush(kept, item)
                if len(kept) > PAIRS:
                    heapq.heappop(kept)

    with attending(model, Mode("hard")), observe_attention(model, look), torch.no_grad():
        for number, window in enumerate(windows):  # noqa: B007  (the observer reads it)
            model(input_ids=window.ids[None].to(device_of(model)), use_cache=False)
    return {
        name: DistantAttention(
            share=(table[1] / np.maximum(table[0], 1e-12)).tolist(),
            distance=np.where(table[1] > 0, table[2] / np.maximum(table[1], 1e-12), 0.0).tolist(),
            pairs=[DistantPair(*item) for item in sorted(heaviest[name], reverse=True)],
        )
        for name, table in sums.items()
    }


def _weights(query: Tensor, key: Tensor, scale: float, pattern: Pattern, memberships: Tensor) -> Tensor:
    """Attention weights ``(T, T)``, mean over heads."""
    positions = torch.arange(query.shape[1], device=query.device)[None]
    allowed = attended_pairs(pattern, positions, positions, memberships, memberships)[0]
    heads = query.shape[0] // key.shape[0]
    total = query.new_zeros(allowed.shape, dtype=torch.float32)
    for head in range(query.shape[0]):
        scores = (query[head].float() @ key[head // heads].float().T) * scale
        total += scores.masked_fill(~allowed, float("-inf")).softmax(dim=-1)
    return total / query.shape[0]
