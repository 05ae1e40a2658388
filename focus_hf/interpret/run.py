"""Make a `GroupReport`: a model, a tokenizer and text in, what each group means out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..adapter import focus_layers
from ..machine import measured_with
from ..records.group_report import GroupReport
from .collect import Collected, Window, collect
from .distance import DistantAttention, distant_attention
from .facts import STRIP, Words, layer_facts
from .treebank import Treebank, read_treebank
from .windows import Gold, text_windows, treebank_windows

#: Heads that a report describes where each has groups of its own: those with most of their attention far away.
MOST_HEADS = 24

#: Windows whose attention weights are spelled out.
WEIGHED = 4


def group_report(
    model: nn.Module,
    tokenizer: Any,
    texts_or_treebank: str | Sequence[str] | Treebank | os.PathLike[str],
    *,
    name: str = "",
    revision: str = "",
    window: int = 1024,
    seed: int = 0,
    tick: Callable[[int], None] = lambda tokens: None,
) -> GroupReport:
    """Look at what an adapter's groups hold, over any text or against a gold treebank.

    Args:
        model: with an active Focus adapter; it keeps its own settings.
        tokenizer: of the model.
        texts_or_treebank: a text, several, or a treebank: its ``.conllu`` file or what `read_treebank` gives.
        name, revision: of the text, for the report.
        window: tokens read at a time, as many as the model has positions at most.
        seed: of examples, bootstrap and random groups.
        tick: called with the tokens of every window read.

    Returns:
        The report, the same for the same seed.

    Raises:
        ValueError: no text, a treebank without a readable sentence, or a tokenizer that cannot be aligned with it.
    """
    positions = getattr(model.config, "max_position_embeddings", None)
    window = window if positions is None else min(window, positions)
    gold: Gold | None = None
    windows: Iterable[Window]
    if isinstance(texts_or_treebank, Treebank | os.PathLike):
        treebank = texts_or_treebank
        if isinstance(treebank, os.PathLike):
            name, treebank = name or Path(treebank).name, read_treebank(treebank)
        gold = treebank_windows(tokenizer, treebank, window)
        windows = gold.windows
    else:
        texts = [texts_or_treebank] if isinstance(texts_or_treebank, str) else texts_or_treebank
        windows = text_windows(tokenizer, texts, window)
    longest: list[Window] = []
    read = _keep_longest(windows, longest)
    found = collect(model, read, categories=None if gold is None else gold.sizes, tick=tick)
    weighed = distant_attention(model, longest)
    words = Words(tokenizer, found)
    config = focus_layers(model)[0].routing_config
    facts = {"name": name, "revision": revision, "tokens": found.tokens, "window": window}
    if gold is not None:
        facts |= {"words": gold.words, "skipped": len(gold.skipped), "first_skipped": gold.skipped[:5]}
    heads_left_out = _keep_furthest(found, weighed)
    layers = [
        layer_facts(layer, found, words, gold, weighed.get(layer.name), longest, seed + number)
        for number, layer in enumerate(found.layers)
    ]
    layers[-1].flow = []
    return GroupReport(
        num_groups=config.num_groups,
        top_k=config.top_k,
        text=facts,
        layers=layers,
        strip=[words.shown(token) for token in found.ids[:STRIP]],
        base_model=config.base_model_name_or_path,
        seed=seed,
        measured_with=measured_with(),
        heads_left_out=heads_left_out,
    )


def _keep_furthest(found: Collected, weighed: dict[str, DistantAttention]) -> int:
    """Keep as many heads as a report describes, in their order, and say how many are left out."""
    if found.layers[0].head is None or len(found.layers) <= MOST_HEADS:
        return 0
    far = {layer.name: weighed[layer.name].overall if layer.name in weighed else 0.0 for layer in found.layers}
    kept = set(sorted(far, key=lambda name: -far[name])[:MOST_HEADS])
    left_out = len(found.layers) - len(kept)
    found.layers = [layer for layer in found.layers if layer.name in kept]
    return left_out


def _keep_longest(windows: Iterable[Window], longest: list[Window]) -> Iterator[Window]:
    """Pass windows on; the longest ones (the earliest of equals) are in ``longest`` in the end."""
    for window in windows:
        longest.append(window)
        longest.sort(key=lambda one: -len(one.ids))
        del longest[WEIGHED:]
        yield window
