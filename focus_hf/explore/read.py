"""Read a text with an adapter and keep what the page shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..adapter import (
    FocusConfig,
    HeadView,
    Router,
    Seen,
    final_scores,
    focus_layers,
    observe_attention,
    observe_routing,
)
from ..attention import Pattern
from ..evaluate.modes import Mode, attending, device_of
from ..interpret.run import setting_of
from .data import LONGEST_WINDOW, TARGETS, ExplorerData, Head
from .text import Passage, passages
from .weights import Stretch, Weights, stretches, weights_of

#: Groups are packed as bytes.
MOST_GROUPS = 255


def explore(
    model: Any,
    tokenizer: Any,
    texts: str | Sequence[str],
    *,
    adapter: str = "",
    name: str = "",
    max_tokens: int = 1500,
    window: int | None = None,
    tick: Callable[[int], None] = lambda tokens: None,
) -> ExplorerData:
    """Look at what an adapter reads in a text, head by head and token by token, at the setting in force.

    The text is read in windows of as many tokens as the model has positions; attention does not cross them.

    Args:
        model: with an active Focus adapter; it keeps its settings.
        tokenizer: of the base model.
        texts: one or several.
        adapter, name: of the adapter and of the text, for people.
        max_tokens: tokens shown.
        window: tokens read at a time; as many as the model has positions by default, and at most.
        tick: called with the number of tokens of every window that was read, twice.

    Raises:
        ValueError: no text, nothing to show, or more groups than the page has room for.
    """
    config = focus_layers(model)[0].routing_config
    if config.num_groups > MOST_GROUPS:
        raise ValueError(f"The page shows up to {MOST_GROUPS} groups; this adapter has {config.num_groups}.")
    texts = [texts] if isinstance(texts, str) else texts
    windows, left_out = passages(tokenizer, texts, max_tokens, window_length(model, max_tokens, window))
    tokens = sum(len(one.ids) for one in windows)
    bands = bands_of_text(config, max(len(one.ids) for one in windows))
    pattern = replace(config.pattern, num_bands=bands)
    reading = _Reading(pattern, tokens)
    losses, dense_losses = (np.full(tokens, np.nan, dtype=np.float32) for _ in range(2))
    starts, start = [], 0
    for passage in windows:
        place = slice(start, start + len(passage.ids))
        with attending(model, Mode("hard")), reading.window(model, place):
            losses[place] = _losses(model, passage)
        tick(len(passage.ids))
        with attending(model, Mode("dense")):
            dense_losses[place] = _losses(model, passage)
        tick(len(passage.ids))
        starts.append(start)
        start = place.stop
    pieces = [piece for passage in windows for piece in passage.pieces]
    heads = reading.done()
    return ExplorerData(
        adapter, name, setting_of(config), pieces, starts, pattern, heads, dense_losses, losses, left_out
    )


def window_length(model: Any, max_tokens: int, window: int | None) -> int:
    """Tokens read at a time: as many as wanted, if the model has the positions.

    Raises:
        ValueError: it is not positive.
    """
    wanted = max_tokens if window is None else window
    if wanted < 1:
        raise ValueError(f"There must be at least one token, got {wanted}.")
    positions = getattr(model.config, "max_position_embeddings", None)
    return min(wanted, LONGEST_WINDOW if positions is None else positions, LONGEST_WINDOW)


def bands_of_text(config: FocusConfig, length: int) -> int:
    """Bands of distance by which a text of this length is told: those of the adapter, or as many as double."""
    bands = 1
    while (max(config.local_window, 1) << bands) < length - 1:
        bands += 1
    return min(bands, config.num_bands) if config.by_cells else bands


class _Reading:
    """What is known of each head while windows are read, one after the other."""

    def __init__(self, pattern: Pattern, tokens: int) -> None:
        self.pattern, self.tokens = pattern, tokens
        self.heads: dict[str, Head] = {}
        self.sums: dict[str, np.ndarray] = {}  # of pairs read, pairs possible, weight times distance, weight

    @contextmanager
    def window(self, model: nn.Module, place: slice) -> Iterator[None]:
        """Within the block, look at what the model reads."""

        def note(router: Router, scores: Tensor, memberships: Tensor) -> None:
            head = router.head if isinstance(router, HeadView) else None
            if router.name not in self.heads:
                name = router.name if head is None else router.name.rpartition(".")[0]
                name = name.removeprefix("base_model.model.")  # PEFT's, so that names agree however a model was made
                size = {"tokens": self.tokens, "bands": self.pattern.num_bands}
                self.heads[router.name] = Head.empty(name, router.layer_idx, head, **size)
                self.sums[router.name] = np.zeros(4)
            best = final_scores(router, scores[0]).argmax(dim=-1)
            self.heads[router.name].groups[place] = best.cpu().numpy()

        def look(seen: Seen) -> None:
            whole = [seen.layer.name] if not seen.layer.routing_config.by_cells else []
            names = whole or [f"{seen.layer.name}.{head}" for head in range(seen.key.shape[1])]
            for stretch in stretches(seen, self.pattern):
                for name in names:
                    self.take(name, stretch, weights_of(seen, stretch, self.heads[name].head), place.start)

        with observe_routing(model, note), observe_attention(model, look):
            yield

    def take(self, name: str, stretch: Stretch, weights: Weights, begin: int) -> None:
        """Note what a stretch of queries reads.

        Args:
            name: of the router.
            stretch: of queries.
            weights: of the head.
            begin: of the window on the page.
        """
        head, rows = self.heads[name], slice(begin + stretch.start, begin + stretch.stop)
        far = stretch.bands.sum(dim=0) * weights.possible
        head.far[rows] = (weights.read * far).sum(dim=-1).cpu()
        head.lost[rows] = (weights.dense * ~weights.pairs).sum(dim=-1).cpu()
        strongest = (torch.maximum(weights.read, weights.dense) * far).topk(min(TARGETS, stretch.stop), dim=-1)
        found = strongest.values > 0
        kept = ((stretch.distance, head.distance), (weights.read, head.weight), (weights.dense, head.dense))
        for of, target in kept:
            target[rows, : found.shape[1]] = (of.gather(-1, strongest.indices) * found).cpu()
        for of, total in ((weights.read, head.received), (weights.possible.float(), head.places)):
            per_token = torch.einsum("qs,bqs->sb", of, stretch.bands)
            total[begin : begin + stretch.stop] += per_token.double().cpu().numpy()
        seen = weights.read * stretch.no_sink
        sums = (weights.pairs.sum(), weights.possible.sum(), (seen * stretch.distance).sum(), seen.sum())
        self.sums[name] += [float(value) for value in sums]

    def done(self) -> list[Head]:
        """The heads, in the order in which the model calls them.

        Raises:
            ValueError: no layer was seen.
        """
        for name, head in self.heads.items():
            pairs, possible, distance, weight = self.sums[name]
            head.pairs, head.reach = pairs / max(possible, 1), distance / max(weight, 1e-9)
        if not self.heads:
            raise ValueError("No layer of this model attends by groups, so there is nothing to show.")
        return list(self.heads.values())


@torch.no_grad()
def _losses(model: nn.Module, passage: Passage, chunk: int = 512) -> np.ndarray:
    """Losses of a window's tokens, float32 ``(T,)`` with NaN first."""
    ids = passage.ids.to(device_of(model))
    logits = model(input_ids=ids[None], use_cache=False).logits[0]
    losses = np.full(len(ids), np.nan, dtype=np.float32)
    for start in range(0, len(ids) - 1, chunk):  # float32 logits of a whole window can be larger than the model
        targets = ids[start + 1 : start + 1 + chunk]
        found = F.cross_entropy(logits[start : start + len(targets)].float(), targets, reduction="none")
        losses[start + 1 : start + 1 + len(targets)] = found.cpu().numpy()
    return losses
