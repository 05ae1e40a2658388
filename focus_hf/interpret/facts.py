"""What a report says of one layer: of each of its groups, and of how it divides tokens between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..records.group_report import GroupFacts, LayerFacts
from .agreement import agreement, contextual_share, count_table, lookup_table, random_table
from .collect import RoutedText, first_windows
from .naming import Name, Namer
from .reading import DistantPair, Reading
from .tokens import display
from .windows import Window

#: Tokens shown before and after an example.
CONTEXT = 4

#: A token counts as lifted or split from so many occurrences on.
LEAST = 5

#: Tokens shown with their groups one by one.
STRIP = 120

#: From this many groups in all layers on, less is shown of each, so that a report stays below a megabyte.
MANY_GROUPS = 250

#: Groups of a head, those that are read most, of which more examples are kept, and how many.
MOST_READ, MOST_EXAMPLES = 3, 5


class ReadText:
    """A text that was read: its tokens by their kinds (ids that occur), and what can be told of all layers.

    Args:
        tokenizer: of the model.
        windows: of the text.
        parts: of speech in `Window.gold`; none for plain text.
        groups: in all layers together.
    """

    def __init__(self, tokenizer: Any, windows: Sequence[Window], parts: Sequence[str], groups: int) -> None:
        self.ids = np.concatenate([window.ids.numpy() for window in windows])
        self.ends = np.cumsum([len(window.ids) for window in windows])
        self.sampled = int(self.ends[len(first_windows(windows)) - 1])
        kinds, kind, self.counts = np.unique(self.ids, return_inverse=True, return_counts=True)
        self.kind = kind.astype(np.int32)  # of every token of the text
        self.texts = {i: tokenizer.decode([i], clean_up_tokenization_spaces=False) for i in kinds.tolist()}
        self.shown = [display(text) for text in self.texts.values()]
        gold = [np.full(len(window.ids), -1) if window.gold is None else window.gold for window in windows if parts]
        self.gold, self.parts = np.concatenate([np.empty(0), *gold]).astype(np.int16), parts
        self.has_gold = self.gold >= 0
        shape = len(kinds), len(parts)
        self.gold_by_kind = count_table(self.kind[self.has_gold], self.gold[self.has_gold], shape) if parts else None
        raw = list(map(str, tokenizer.convert_ids_to_tokens(kinds.tolist())))
        self.namer = Namer(list(self.texts.values()), raw, self.counts, self.gold_by_kind, parts)
        # Tokens and examples of a group, split tokens and pairs of a layer.
        self.tokens, self.examples, self.split, self.pairs = (8, 2, 3, 5) if groups <= MANY_GROUPS else (5, 1, 1, 2)

    def context(self, ids: np.ndarray, place: int) -> dict[str, str]:
        """A token of a window between its neighbours."""
        before, after = (
            display("".join(self.texts[int(i)] for i in some)).replace("␣", " ")
            for some in (ids[max(0, place - CONTEXT) : place], ids[place + 1 : place + 1 + CONTEXT])
        )
        return {"before": before, "token": display(self.texts[int(ids[place])]), "after": after}

    def example(self, place: int) -> dict[str, str]:
        """A token of the text in its own window."""
        window = int(np.searchsorted(self.ends, place, side="right"))
        start = int(self.ends[window - 1]) if window else 0
        return self.context(self.ids[start : self.ends[window]], place - start)

    def pair(self, pair: DistantPair) -> dict[str, Any]:
        """Two tokens that meet."""
        return {
            "weight": round(pair.weight, 4),
            "distance": pair.query - pair.key,
            "group": pair.group,
            "query": self.context(pair.ids, pair.query),
            "key": self.context(pair.ids, pair.key),
        }


def layer_facts(
    routed: RoutedText, text: ReadText, reading: Reading | None, lost: tuple[float, float] | None, seed: int
) -> LayerFacts:
    """Everything that a report says of one layer or head.

    Args:
        routed: the text's groups.
        text: that was read.
        reading: what it reads; ``None`` if no window was long enough.
        lost: what the model loses without that, and its standard error.
        seed: of examples and random groups.
    """
    generator = np.random.default_rng(seed)
    groups = routed.groups
    sample, by_kind = groups[: text.sampled], count_table(text.kind, groups, (len(text.counts), routed.num_groups))
    gold, agreements = None, dict[str, Any]()
    if text.gold_by_kind is not None:
        gold = count_table(groups[text.has_gold], text.gold[text.has_gold], (routed.num_groups, len(text.parts)))
        chance, lookup = random_table(gold, seed), lookup_table(by_kind, text.gold_by_kind)
        agreements["upos"] = {
            which: {name: round(value, 4) for name, value in agreement(table).items()}
            for which, table in (("groups", gold), ("random", chance), ("lookup", lookup))
        }
    home = by_kind.argmax(axis=1)
    names = text.namer.names(by_kind, gold)
    facts = LayerFacts(
        name=routed.name,
        groups=[_group(by_kind[:, group], home != group, name, text) for group, name in enumerate(names)],
        contextual=round(contextual_share(by_kind), 6),
        agreement=agreements,
        split=_split_tokens(by_kind, sample, text, generator),
        strip=sample[:STRIP].tolist(),
        head=routed.head,
    )
    if reading is not None:
        facts.reads = _rounded(reading.reads / np.maximum(reading.queries, 1), 4)
        facts.attention = _rounded(reading.attention / max(reading.tokens, 1), 6)
        facts.silent = round(reading.silent / max(reading.far, 1), 4)
        facts.pairs = [text.pair(pair) for pair in reading.pairs[: text.pairs]]
    if lost is not None:
        facts.loss, facts.loss_error = round(lost[0], 6), round(lost[1], 6)
    much = set(facts.most_read(MOST_READ))
    for number, group in enumerate(facts.groups):
        places = generator.permutation((sample == number).nonzero()[0])
        chosen = np.sort(places[: MOST_EXAMPLES if number in much else text.examples])
        group.examples = [text.example(int(place)) for place in chosen]
    return facts


def _group(counts: np.ndarray, elsewhere: np.ndarray, name: Name, text: ReadText) -> GroupFacts:
    """One group: ``counts`` are of each kind in it, ``elsewhere`` says of which most are in another group."""
    size = int(counts.sum())
    share = size / len(text.ids)
    top = [kind for kind in np.argsort(-counts, kind="stable")[: text.tokens] if counts[kind]]
    lift = np.where((text.counts >= LEAST) & (counts > 0), counts / text.counts / max(share, 1e-12), 0.0)
    lifted = [kind for kind in np.lexsort((-counts, -lift))[: text.tokens] if lift[kind] > 1]
    return GroupFacts(
        share=round(share, 5),
        name=name.name,
        covers=round(name.covers, 4),
        chance=round(name.chance, 4),
        lookup=round(name.lookup, 4),
        contextual=round(float(counts[elsewhere].sum() / max(size, 1)), 4),
        top=[{"token": text.shown[kind], "count": int(counts[kind])} for kind in top],
        lifted=[
            {"token": text.shown[kind], "count": int(counts[kind]), "lift": round(float(lift[kind]), 2)}
            for kind in lifted
        ],
    )


def _split_tokens(
    by_kind: np.ndarray, sample: np.ndarray, text: ReadText, generator: np.random.Generator
) -> list[dict[str, Any]]:
    """Frequent tokens that are most evenly divided between two groups, with an example in each: those of which the
    second group has most occurrences."""
    second = np.sort(by_kind, axis=1)[:, -2] if by_kind.shape[1] > 1 else np.zeros(len(by_kind))
    result = []
    for kind in np.argsort(-second, kind="stable")[: text.split]:
        if second[kind] < LEAST:
            break
        examples = {}
        for group in np.argsort(-by_kind[kind], kind="stable")[:2]:
            places = ((text.kind[: len(sample)] == kind) & (sample == group)).nonzero()[0]
            if len(places):
                examples[str(int(group))] = text.example(int(generator.choice(places)))
        result.append({"token": text.shown[kind], "counts": by_kind[kind].tolist(), "examples": examples})
    return result


def _rounded(table: np.ndarray, digits: int) -> list[list[float]]:
    return [[round(value, digits) for value in row] for row in table.tolist()]
