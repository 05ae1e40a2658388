"""Make a `GroupReport`: a model, a tokenizer and text in, what each group means out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from ..adapter import focus_layers
from ..machine import measured_with
from ..records.group_report import GroupFacts, GroupReport, LayerFacts
from .agreement import agreement, category_label, contextual_share, lookup_table, random_table
from .collect import Collected, LayerCounts, Window, collect
from .distance import DistantAttention, distant_attention
from .tokens import PROFILE, display, profile, raw_tokens, token_texts
from .treebank import Treebank, read_treebank
from .windows import Gold, text_windows, treebank_windows

#: Tokens shown before and after an example.
CONTEXT = 4

#: From this many groups in all layers on, less is shown of each, so that a report stays below a megabyte.
MANY_GROUPS = 250

#: Heads that a report describes where each has groups of its own: those with most of their attention far away.
MOST_HEADS = 24

#: A token counts as lifted or split from so many occurrences on.
LEAST = 5

#: Tokens shown with their groups one by one.
STRIP = 120

#: Windows whose attention weights are spelled out.
WEIGHED = 4

DRAWS = 200


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
    words = _Words(tokenizer, found)
    config = focus_layers(model)[0].routing_config
    facts = {"name": name, "revision": revision, "tokens": found.tokens, "window": window}
    if gold is not None:
        facts |= {"words": gold.words, "skipped": len(gold.skipped), "first_skipped": gold.skipped[:5]}
    heads_left_out = _keep_furthest(found, weighed)
    layers = [
        _layer(layer, found, words, gold, weighed.get(layer.name), longest, seed + number)
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


@dataclass(frozen=True)
class _Detail:
    """How much a report shows: tokens and examples of a group, split tokens and pairs of a layer."""

    tokens: int
    examples: int
    split: int
    pairs: int

    @classmethod
    def of(cls, found: Collected) -> _Detail:
        groups = sum(layer.num_groups for layer in found.layers)
        return cls(8, 2, 3, 5) if groups <= MANY_GROUPS else cls(5, 1, 1, 1)


class _Words:
    """Texts of the tokens that occur, and how often each does."""

    def __init__(self, tokenizer: Any, found: Collected) -> None:
        self.counts = found.layers[0].by_token.sum(axis=1, dtype=np.int64)
        self.seen = self.counts.nonzero()[0]
        self.texts = token_texts(tokenizer, self.seen)
        raw = raw_tokens(tokenizer, self.seen)
        self.profiles = np.zeros((len(self.counts), len(PROFILE)), dtype=bool)
        for token in self.seen:
            self.profiles[token] = profile(self.texts[int(token)], raw[int(token)])

    def shown(self, token: int) -> str:
        return display(self.texts[int(token)])

    def context(self, ids: np.ndarray, place: int) -> dict[str, str]:
        """A token between its neighbours."""
        before = "".join(self.texts[int(i)] for i in ids[max(0, place - CONTEXT) : place])
        after = "".join(self.texts[int(i)] for i in ids[place + 1 : place + 1 + CONTEXT])
        return {
            "before": display(before).replace("␣", " "),
            "token": self.shown(ids[place]),
            "after": display(after).replace("␣", " "),
        }


def _layer(
    layer: LayerCounts,
    found: Collected,
    words: _Words,
    gold: Gold | None,
    weighed: DistantAttention | None,
    windows: Sequence[Window],
    seed: int,
) -> LayerFacts:
    generator, detail = np.random.default_rng(seed), _Detail.of(found)
    sample = np.concatenate(layer.sample)
    groups = [_group(layer, group, found, words, sample, generator, detail) for group in range(layer.num_groups)]
    agreements: dict[str, Any] = {}
    for kind in () if gold is None else ("upos", "deprel"):
        table = layer.gold[kind].sum(axis=0)
        agreements[kind] = {
            "groups": agreement(table).to_dict(),
            "random": agreement(random_table(table, seed)).to_dict(),
            "lookup": agreement(lookup_table(layer.by_token, found.gold_by_token[kind])).to_dict(),
        }
    for kind, names in ({} if gold is None else gold.names).items():
        for number, group in enumerate(groups):
            group.labels[kind] = _rounded(category_label(layer.gold[kind], names, number, draws=DRAWS, seed=seed))
    if gold is not None:
        table = layer.gold["upos"].sum(axis=0)
        for group, row in zip(groups, table / np.maximum(table.sum(axis=1, keepdims=True), 1), strict=True):
            group.upos = {
                name: round(float(share), 3)
                for name, share in zip(gold.names["upos"], row, strict=True)
                if share >= 0.01
            }
    pairs = []
    if weighed is not None:
        for number, group in enumerate(groups):
            group.distant, group.distance = weighed.share[number], weighed.distance[number]
        for pair in weighed.pairs[: detail.pairs]:
            ids = windows[pair.window].ids.numpy()
            pairs.append(
                {
                    "weight": pair.weight,
                    "affinity": pair.affinity,
                    "distance": pair.query - pair.key,
                    "group": pair.group,
                    "query": words.context(ids, pair.query),
                    "key": words.context(ids, pair.key),
                }
            )
    return LayerFacts(
        name=layer.name,
        groups=groups,
        contextual=contextual_share(layer.by_token),
        agreement=_rounded(agreements),
        flow=layer.to_next.tolist() if layer.head is None else [],
        split=_split_tokens(layer, found, words, sample, generator, detail.split),
        pairs=_rounded(pairs),
        strip=sample[:STRIP].tolist(),
        head=layer.head,
    )


def _group(
    layer: LayerCounts,
    group: int,
    found: Collected,
    words: _Words,
    sample: np.ndarray,
    generator: np.random.Generator,
    detail: _Detail,
) -> GroupFacts:
    counts, size = layer.by_token[:, group], int(layer.sizes[group])
    share = size / found.tokens
    top = [token for token in np.argsort(-counts, kind="stable")[: detail.tokens] if counts[token]]
    lift = np.zeros(len(counts))
    enough = (words.counts >= LEAST) & (counts > 0)
    lift[enough] = counts[enough] / words.counts[enough] / max(share, 1e-12)
    lifted = [token for token in np.lexsort((-counts, -lift))[: detail.tokens] if lift[token] > 1]
    places = (sample == group).nonzero()[0]
    chosen = np.sort(generator.permutation(places)[: detail.examples])
    weights = counts[words.seen] / max(size, 1)
    return GroupFacts(
        share=round(share, 5),
        confidence=round(float(layer.confidence_sum[group] / max(size, 1)), 4),
        confidences=layer.confidence[group].tolist(),
        positions=layer.position[group].tolist(),
        top=[{"token": words.shown(token), "count": int(counts[token])} for token in top],
        lifted=[
            {"token": words.shown(token), "count": int(counts[token]), "lift": round(float(lift[token]), 2)}
            for token in lifted
        ],
        profile={
            name: round(float(counts[words.profiles[:, i]].sum() / max(size, 1)), 4) for i, name in enumerate(PROFILE)
        },
        frequency=round(float((weights * np.log(np.maximum(words.counts[words.seen], 1))).sum()), 3),
        examples=[_example(found, words, int(place)) for place in chosen],
    )


def _example(found: Collected, words: _Words, place: int) -> dict[str, str]:
    """A sampled token in its own window."""
    ends = np.cumsum(found.windows)
    window = int(np.searchsorted(ends, place, side="right"))
    start = int(ends[window] - found.windows[window])
    return words.context(found.ids[start : int(ends[window])], place - start)


def _split_tokens(
    layer: LayerCounts,
    found: Collected,
    words: _Words,
    sample: np.ndarray,
    generator: np.random.Generator,
    most: int,
) -> list[dict[str, Any]]:
    """Frequent tokens that are most evenly divided between two groups, with an example in each."""
    ordered = -np.sort(-layer.by_token, axis=1)
    second = ordered[:, 1] if layer.num_groups > 1 else np.zeros(len(ordered), dtype=np.int64)
    # Divided evenly and often: by how many occurrences the second group has.
    result = []
    for token in np.argsort(-second, kind="stable")[:most]:
        if second[token] < LEAST:
            break
        examples = {}
        for group in np.argsort(-layer.by_token[token], kind="stable")[:2]:
            places = ((found.ids == token) & (sample == group)).nonzero()[0]
            if len(places):
                examples[str(int(group))] = _example(found, words, int(generator.choice(places)))
        result.append({"token": words.shown(token), "counts": layer.by_token[token].tolist(), "examples": examples})
    return result


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value
