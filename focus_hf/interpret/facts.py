"""What a report says of one layer: of each of its groups, and of how it divides tokens between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..records.group_report import GroupFacts, LayerFacts
from .agreement import agreement, category_label, contextual_share, lookup_table, random_table
from .collect import Collected, LayerCounts, Window
from .distance import DistantAttention
from .tokens import PROFILE, display, profile, raw_tokens, token_texts
from .windows import Gold

#: Tokens shown before and after an example.
CONTEXT = 4

#: From this many groups in all layers on, less is shown of each, so that a report stays below a megabyte.
MANY_GROUPS = 250

#: A token counts as lifted or split from so many occurrences on.
LEAST = 5

#: Tokens shown with their groups one by one.
STRIP = 120

#: Of the bootstrap behind a label's interval.
DRAWS = 200


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


class Words:
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


def layer_facts(
    layer: LayerCounts,
    found: Collected,
    words: Words,
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
    words: Words,
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


def _example(found: Collected, words: Words, place: int) -> dict[str, str]:
    """A sampled token in its own window."""
    ends = np.cumsum(found.windows)
    window = int(np.searchsorted(ends, place, side="right"))
    start = int(ends[window] - found.windows[window])
    return words.context(found.ids[start : int(ends[window])], place - start)


def _split_tokens(
    layer: LayerCounts,
    found: Collected,
    words: Words,
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
