"""Make a `GroupReport`: a model, a tokenizer and text in, what each group means and who reads it out."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..adapter import FocusConfig, focus_layers
from ..adapter.discovery import find_attention
from ..machine import measured_with
from ..records.group_report import GroupReport
from .collect import collect
from .facts import STRIP, ReadText, layer_facts
from .reading import loss_without, what_is_read
from .treebank import Treebank, read_treebank
from .windows import Window, gold_windows, text_windows

#: Heads that a report describes where each has groups of its own: those that look for distant tokens most.
MOST_HEADS = 24

#: Windows whose attention weights are spelled out: the longest. On some of them heads are left out, one by one.
WEIGHED, ABLATED = 4, 2


def group_report(
    model: nn.Module,
    tokenizer: Any,
    texts_or_treebank: str | Sequence[str] | Treebank | os.PathLike[str],
    *,
    texts: Sequence[str] = (),
    name: str = "",
    revision: str = "",
    window: int = 1024,
    heads: int | None = None,
    seed: int = 0,
    tick: Callable[[int], None] = lambda tokens: None,
) -> GroupReport:
    """Look at what an adapter's groups hold, over any text or against a gold treebank.

    Args:
        model: with an active Focus adapter; it keeps its own settings.
        tokenizer: of the model.
        texts_or_treebank: a text, several, or a treebank: its ``.conllu`` file or what `read_treebank` gives.
        texts: read besides a treebank: its documents are often too short to show what is read far away.
        name, revision: of the text, for the report.
        window: tokens read at a time, as many as the model has positions at most.
        heads: at most so many are described and left out one by one, `MOST_HEADS` by default.
        seed: of examples and random groups.
        tick: called with the tokens of every window read.

    Returns:
        The report, the same for the same seed.

    Raises:
        ValueError: no text, a treebank without a readable sentence, or a tokenizer that cannot be aligned with it.
    """
    window = min(window, getattr(model.config, "max_position_embeddings", None) or window)
    facts: dict[str, Any] = {}
    windows: list[Window] = []
    parts: list[str] = []
    if isinstance(texts_or_treebank, os.PathLike):
        name = name or Path(texts_or_treebank).name
        texts_or_treebank = read_treebank(texts_or_treebank)
    if isinstance(texts_or_treebank, Treebank):
        documents, skipped = texts_or_treebank.documents, texts_or_treebank.skipped
        parts = sorted({word.upos for document in documents for word in document.words})
        windows += gold_windows(tokenizer, documents, parts, window)
        words = sum(len(document.words) for document in documents)
        facts = {"words": words, "skipped": len(skipped), "first_skipped": skipped[:5]}
    else:
        texts = [texts_or_treebank] if isinstance(texts_or_treebank, str) else [*texts_or_treebank, *texts]
    if texts or not parts:
        windows += text_windows(tokenizer, texts, window)
    if not windows:
        raise ValueError("There is no text to look at.")
    longest = sorted(windows, key=lambda one: -len(one.ids))[:WEIGHED]
    reading = what_is_read(model, longest)
    by_far = sorted(reading, key=lambda one: -reading[one].looks_far)
    config = focus_layers(model)[0].routing_config
    chosen = set(by_far[: heads or MOST_HEADS]) if config.by_cells and by_far else None
    lost = loss_without(model, [one for one in reading if chosen is None or one in chosen], longest[:ABLATED], tick)
    routed = collect(model, windows, only=chosen, tick=tick)
    text = ReadText(tokenizer, windows, parts, groups=config.num_groups * len(routed))
    layers = [
        layer_facts(one, text, reading.get(one.name), lost.get(one.name), seed + number)
        for number, one in enumerate(routed)
    ]
    return GroupReport(
        num_groups=config.num_groups,
        top_k=config.top_k,
        text={"name": name, "revision": revision, "tokens": len(text.ids), "window": window, **facts},
        layers=layers,
        bands=config.pattern.band_starts(),
        setting=setting_of(config),
        strip=[text.shown[kind] for kind in text.kind[:STRIP]],
        base_model=config.base_model_name_or_path,
        attention_layers=sum(1 for _ in find_attention(model)),
        routed_layers=len(focus_layers(model)),
        seed=seed,
        measured_with=measured_with(),
        heads_left_out=0 if chosen is None else len(reading) - len(chosen),
    )


def setting_of(config: FocusConfig) -> str:
    """Where the dial stands, as `set_routing` takes it."""
    if not config.by_cells:
        return f"top_k={config.top_k}"
    return f"pairs={config.pairs:g}" if config.pairs is not None else f"threshold={config.threshold:g}"
