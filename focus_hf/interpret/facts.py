"""What a report says of one layer: of each of its groups, and of how it divides tokens between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..records.group_report import GroupFacts, LayerFacts
from .agreement import agreement, contextual_share, lookup_table, random_table
from .collect import Collected, LayerCounts, Window
from .naming import Name, Namer
from .reading import DistantPair, Reading
from .tokens import PROFILE, display, profile, raw_tokens, token_texts

#: Tokens shown before and after an example.
CONTEXT = 4

#: A token counts as lifted or split from so many occurrences on.
LEAST = 5

#: Tokens shown with their groups one by one.
STRIP = 120

#: From this many groups in all layers on, less is shown of each, so that a report stays below a megabyte.
MANY_GROUPS = 250

#: Groups of a head, those that are read most, of which more examples are kept.
MOST_READ = 3


@dataclass(frozen=True)
class _Detail:
    """How much a report shows: tokens of a group, examples of it and of one that is read much, split tokens and pairs
    of a layer."""

    tokens: int
    examples: int
    most: int
    split: int
    pairs: int

    @classmethod
    def of(cls, found: Collected) -> _Detail:
        groups = sum(layer.num_groups for layer in found.layers)
        return cls(8, 2, 5, 3, 5) if groups <= MANY_GROUPS else cls(5, 1, 5, 1, 2)


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
        """A token as visible text."""
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
    namer: Namer,
    reading: Reading | None,
    lost: tuple[float, float] | None,
    windows: Sequence[Window],
    seed: int,
) -> LayerFacts:
    """Everything that a report says of one layer or head.

    Args:
        layer: its counts.
        found: counts of all.
        words: of the text.
        namer: of its groups.
        reading: what it reads; ``None`` if no window was long enough.
        lost: what the model loses without that, and its standard error.
        windows: those that ``reading`` is of.
        seed: of examples and random groups.
    """
    generator, detail = np.random.default_rng(seed), _Detail.of(found)
    sample = np.concatenate(layer.sample)
    gold, agreements = None, dict[str, Any]()
    if found.gold_by_token is not None:
        gold = layer.gold
        agreements["upos"] = {
            "groups": agreement(gold),
            "random": agreement(random_table(gold, seed)),
            "lookup": agreement(lookup_table(layer.by_token, found.gold_by_token)),
        }
    names = namer.names(layer.by_token, gold)
    home = layer.by_token.argmax(axis=1)
    groups = [_group(layer, group, names[group], home, found, words, detail) for group in range(layer.num_groups)]
    facts = LayerFacts(
        name=layer.name,
        groups=groups,
        contextual=round(contextual_share(layer.by_token), 6),
        agreement=_rounded(agreements),
        split=_split_tokens(layer, found, words, sample, generator, detail.split),
        strip=sample[:STRIP].tolist(),
        head=layer.head,
    )
    if reading is not None:
        facts.reads = _rounded((reading.reads / np.maximum(reading.queries, 1)).tolist())
        facts.attention = _rounded((reading.attention / max(reading.tokens, 1)).tolist(), 6)
        facts.silent = round(reading.silent / max(reading.far, 1), 4)
        facts.pairs = [_pair(pair, words, windows) for pair in reading.pairs[: detail.pairs]]
    if lost is not None:
        facts.loss, facts.loss_error = round(lost[0], 6), round(lost[1], 6)
    much = set(facts.most_read(MOST_READ))
    for number, group in enumerate(groups):
        places = (sample == number).nonzero()[0]
        count = detail.most if number in much else detail.examples
        chosen = np.sort(generator.permutation(places)[:count])
        group.examples = [_example(found, words, int(place)) for place in chosen]
    return facts


def _pair(pair: DistantPair, words: Words, windows: Sequence[Window]) -> dict[str, Any]:
    ids = windows[pair.window].ids.numpy()
    return {
        "weight": round(pair.weight, 4),
        "distance": pair.query - pair.key,
        "group": pair.group,
        "query": words.context(ids, pair.query),
        "key": words.context(ids, pair.key),
    }


def _group(
    layer: LayerCounts,
    group: int,
    name: Name,
    home: np.ndarray,
    found: Collected,
    words: Words,
    detail: _Detail,
) -> GroupFacts:
    counts, size = layer.by_token[:, group], int(layer.sizes[group])
    share = size / found.tokens
    top = [token for token in np.argsort(-counts, kind="stable")[: detail.tokens] if counts[token]]
    lift = np.zeros(len(counts))
    enough = (words.counts >= LEAST) & (counts > 0)
    lift[enough] = counts[enough] / words.counts[enough] / max(share, 1e-12)
    lifted = [token for token in np.lexsort((-counts, -lift))[: detail.tokens] if lift[token] > 1]
    return GroupFacts(
        share=round(share, 5),
        name=name.name,
        covers=round(name.covers, 4),
        chance=round(name.chance, 4),
        lookup=round(name.lookup, 4),
        contextual=round(float(counts[home != group].sum() / max(size, 1)), 4),
        top=[{"token": words.shown(token), "count": int(counts[token])} for token in top],
        lifted=[
            {"token": words.shown(token), "count": int(counts[token]), "lift": round(float(lift[token]), 2)}
            for token in lifted
        ],
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


def _rounded(value: Any, digits: int = 4) -> Any:
    if isinstance(value, float):
        return round(value, digits)
    if isinstance(value, dict):
        return {key: _rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item, digits) for item in value]
    return value
