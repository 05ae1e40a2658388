"""Read a text with an adapter and keep what the page shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..adapter import HeadView, Router, Seen, final_scores, focus_layers, observe_attention, observe_routing
from ..evaluate.modes import Mode, attending, device_of
from ..interpret.run import setting_of
from ..interpret.weights import stretches
from .data import ExplorerData, Head
from .text import passages

#: Groups are packed as bytes, distances as 16 bits.
MOST_GROUPS, LONGEST_WINDOW = 255, 65_535


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
    wanted = max_tokens if window is None else window
    if wanted < 1:
        raise ValueError(f"There must be at least one token, got {wanted}.")
    positions = getattr(model.config, "max_position_embeddings", None) or LONGEST_WINDOW
    windows, left_out = passages(tokenizer, texts, max_tokens, min(wanted, positions, LONGEST_WINDOW))
    pieces = [piece for passage in windows for piece in passage.pieces]
    lengths = [len(passage.pieces) for passage in windows]
    bands = 1  # as many as double the local window until it holds the text; of routing by cells no more than it has
    while (max(config.local_window, 1) << bands) < max(lengths) - 1:
        bands += 1
    pattern = replace(config.pattern, num_bands=min(bands, config.num_bands) if config.by_cells else bands)
    losses, dense_losses = np.full((2, len(pieces)), np.nan, dtype=np.float32)
    heads: dict[str, Head] = {}

    def note(router: Router, scores: Tensor, memberships: Tensor) -> None:
        if router.name not in heads:
            head = router.head if isinstance(router, HeadView) else None
            module = router.name if head is None else router.name.rpartition(".")[0]
            module = module.removeprefix("base_model.model.")  # PEFT's: names agree however a model was made
            heads[router.name] = Head(module, router.layer_idx, head, len(pieces), pattern.num_bands)
        heads[router.name].groups[place] = final_scores(router, scores[0]).argmax(dim=-1).cpu()

    def look(seen: Seen) -> None:
        for stretch in stretches(seen, pattern):
            heads[stretch.name].take(stretch, place.start)

    places = [slice(stop - length, stop) for stop, length in zip(accumulate(lengths), lengths, strict=True)]
    for passage, place in zip(windows, places, strict=True):
        with attending(model, Mode("hard")), observe_routing(model, note), observe_attention(model, look):
            losses[place] = _losses(model, passage.ids)
        tick(len(passage.ids))
        with attending(model, Mode("dense")):
            dense_losses[place] = _losses(model, passage.ids)
        tick(len(passage.ids))
    if not heads:
        raise ValueError("No layer of this model attends by groups, so there is nothing to show.")
    starts, found, setting = [place.start for place in places], list(heads.values()), setting_of(config)
    return ExplorerData(adapter, name, setting, pieces, starts, pattern, found, dense_losses, losses, left_out)


@torch.no_grad()
def _losses(model: nn.Module, ids: Tensor) -> np.ndarray:
    """Losses of a window's tokens, float32 ``(T,)`` with NaN first."""
    ids = ids.to(device_of(model))
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    parts = zip(logits.split(512), ids[1:].split(512), strict=True)  # a whole window's may be larger than the model
    losses = torch.cat([F.cross_entropy(some.float(), targets, reduction="none") for some, targets in parts])
    return F.pad(losses, (1, 0), value=torch.nan).cpu().numpy()
