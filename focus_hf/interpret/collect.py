"""Run a model over text and add up what its groups hold, in memory that does not grow with the text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ..adapter import HeadView, Router, final_scores, observe_routing
from ..evaluate.modes import Mode, attending, device_of

#: Tokens whose groups are kept one by one, for examples.
SAMPLE = 20_000


@dataclass(frozen=True)
class Window:
    """A stretch of text.

    Args:
        ids: token ids ``(T,)``.
        gold: each token's part of speech as a number, -1 for none; ``None`` for plain text.
    """

    ids: Tensor
    gold: np.ndarray | None = None


class LayerCounts:
    """What the groups of one layer, or of one head that routes by itself, hold."""

    def __init__(self, router: Router, num_groups: int, vocabulary: int, parts: int) -> None:
        self.name, self.num_groups = router.name, num_groups
        self.head = router.head if isinstance(router, HeadView) else None
        self.by_token = np.zeros((vocabulary, num_groups), dtype=np.int32)  # by far the largest table
        self.sample: list[np.ndarray] = []
        self.gold = np.zeros((num_groups, parts), dtype=np.int64)

    @property
    def sizes(self) -> np.ndarray:
        """Tokens in each group, by their first group."""
        return self.by_token.sum(axis=0, dtype=np.int64)


@dataclass
class Collected:
    """What `collect` found.

    Args:
        layers: in order.
        ids: ids of the sampled tokens, window after window; ``layers[i].sample`` holds their groups.
        windows: lengths of the sampled windows.
        tokens: all tokens read.
        gold_by_token: counts ``(vocabulary, parts of speech)``; ``None`` for plain text.
    """

    layers: list[LayerCounts]
    ids: np.ndarray
    windows: list[int]
    tokens: int
    gold_by_token: np.ndarray | None = None


def collect(
    model: nn.Module,
    windows: Iterable[Window],
    *,
    parts: int = 0,
    only: Collection[str] | None = None,
    tick: Callable[[int], None] = lambda tokens: None,
) -> Collected:
    """Read windows in hard mode, one at a time.

    Args:
        model: with an active Focus adapter.
        windows: of text.
        parts: of speech in `Window.gold`; 0 for plain text.
        only: names of the layers or heads to count; all of them by default.
        tick: called with the tokens of each window that has been read.
    """
    vocabulary = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    counts: dict[str, LayerCounts] = {}
    seen: dict[str, np.ndarray] = {}

    def look(router: Router, scores: Tensor, memberships: Tensor) -> None:
        if only is not None and router.name not in only:
            return
        if router.name not in counts:
            counts[router.name] = LayerCounts(router, scores.shape[-1], vocabulary, parts)
        seen[router.name] = final_scores(router, scores[0]).argmax(dim=-1).cpu().numpy()

    ids_kept: list[np.ndarray] = []
    lengths: list[int] = []
    total = 0
    gold_by_token = np.zeros((vocabulary, parts), dtype=np.int64) if parts else None
    with attending(model, Mode("hard")), observe_routing(model, look), torch.no_grad():
        for window in windows:
            model(input_ids=window.ids[None].to(device_of(model)), use_cache=False)
            keep = sum(lengths) < SAMPLE
            if keep:
                ids_kept.append(window.ids.numpy())
                lengths.append(len(window.ids))
            for name, group in seen.items():
                _add(counts[name], window, group, keep)
            if gold_by_token is not None and window.gold is not None:
                known = window.gold >= 0
                np.add.at(gold_by_token, (window.ids.numpy()[known], window.gold[known]), 1)
            total += len(window.ids)
            tick(len(window.ids))
    if not total:
        raise ValueError("There is no text to look at.")
    return Collected(list(counts.values()), np.concatenate(ids_kept), lengths, total, gold_by_token)


def _add(layer: LayerCounts, window: Window, group: np.ndarray, keep: bool) -> None:
    np.add.at(layer.by_token, (window.ids.numpy(), group), 1)
    if keep:
        layer.sample.append(group.astype(np.int16))
    if window.gold is not None:
        known = window.gold >= 0
        np.add.at(layer.gold, (group[known], window.gold[known]), 1)
