"""Names of groups, by evidence: what at least half of a group's tokens have in common, and few others.

Candidates are gold categories (of a treebank), properties of a token's text, endings of words, and the group's own
most frequent kinds of tokens. Of those that fit at least half of the group, the one is taken that says most about it:
the divergence between the share that fits in the group and the share that fits in the text. "names" at 90 % and 5 %
says more than "capitalised words" at 95 % and 15 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from .tokens import PROFILE, display

#: A name must fit this share of a group's tokens, and this much more of them than of all tokens.
COVERS, LIFT = 0.5, 2.0

#: A group of fewer tokens has no name: too little is known about it.
LEAST_TOKENS = 20

#: Kinds of tokens that a name may list; an ending must be that of as many kinds at least.
KINDS = 3

#: A kind that a name lists has this share of the group's tokens at least.
LISTED = 0.1

#: Universal Dependencies' parts of speech and the kinds of words in code (`source_code`), as people call them.
PARTS_OF_SPEECH = {
    "ADJ": "adjectives",
    "ADP": "prepositions",
    "ADV": "adverbs",
    "AUX": "auxiliary verbs",
    "CCONJ": "conjunctions",
    "DET": "articles and determiners",
    "INTJ": "interjections",
    "NOUN": "nouns",
    "NUM": "numbers",
    "PART": "particles",
    "PRON": "pronouns",
    "PROPN": "names",
    "PUNCT": "punctuation",
    "SCONJ": "subordinating conjunctions",
    "SYM": "symbols",
    "VERB": "verbs",
    "ATTRIBUTE": "attributes",
    "CALL": "names of what is called",
    "CLOSE": "closing brackets",
    "COMMENT": "comments",
    "DEFINITION": "names of what is defined",
    "IMPORT": "names of imports",
    "INDENT": "indentation",
    "KEYWORD": "keywords",
    "NEWLINE": "line breaks",
    "NUMBER": "numbers",
    "OPEN": "opening brackets",
    "OPERATOR": "operators",
    "PARAMETER": "parameters",
    "STRING": "strings",
    "TARGET": "variables that are assigned",
    "VARIABLE": "variables that are read",
}

_PROPERTIES = {
    "punctuation": "punctuation",
    "digits": "numbers",
    "capitalised": "capitalised words",
    "word-initial": "starts of words",
    "sub-word": "inner parts of words",
    "whitespace": "line breaks and spaces",
}

_SIGNS = {
    ",": "commas", ".": "full stops", ";": "semicolons", ":": "colons", "?": "question marks",
    "!": "exclamation marks", "(": "opening brackets", ")": "closing brackets", '"': "quotation marks",
    "'": "apostrophes", "-": "hyphens", "--": "dashes", "\n": "line breaks", "\n\n": "blank lines", " ": "spaces",
}  # fmt: skip


@dataclass(frozen=True)
class Name:
    """What a group is called; see `focus_hf.records.GroupFacts` for the shares."""

    name: str
    covers: float = 0.0
    chance: float = 0.0
    lookup: float = 0.0


class Namer:
    """Names groups of one text.

    Args:
        texts: of the tokens that occur.
        profiles: bool ``(vocabulary, len(PROFILE))``.
        counts: of each token in the text, ``(vocabulary,)``.
        gold: counts ``(vocabulary, parts of speech)`` in the text, where it has them.
        parts: their names.
    """

    def __init__(
        self,
        texts: Mapping[int, str],
        profiles: np.ndarray,
        counts: np.ndarray,
        gold: np.ndarray | None = None,
        parts: tuple[str, ...] = (),
    ) -> None:
        self.profiles, self.counts, self.gold, self.parts = profiles, counts, gold, parts
        self.kinds: list[str] = []
        numbers: dict[str, int] = {}
        self.kind_of = np.full(len(counts), -1)
        for token, text in texts.items():
            kind = text.strip().lower() or text
            self.kind_of[token] = numbers.setdefault(kind, len(numbers))
        self.kinds = list(numbers)
        self.seen = np.array(sorted(texts), dtype=np.int64)

    def names(self, by_token: np.ndarray, gold_of: np.ndarray | None = None) -> list[Name]:
        """The name of each group.

        Args:
            by_token: counts ``(vocabulary, K)``.
            gold_of: counts ``(K, parts of speech)``, of a text that has them.
        """
        home = by_token.argmax(axis=1)  # of a look-up by token
        return [self._name(by_token, group, home, gold_of) for group in range(by_token.shape[1])]

    def _name(self, by_token: np.ndarray, group: int, home: np.ndarray, gold_of: np.ndarray | None) -> Name:
        inside = by_token[:, group].astype(np.int64)
        if not inside.any():
            return Name("empty")
        at_home = np.where(home == group, self.counts, 0)
        found: list[Name] = []
        for name, fits in self._candidates(inside):
            shares = [_share(fits, weights) for weights in (inside, self.counts, at_home)]
            found.append(Name(name, *shares))
        if gold_of is not None and self.gold is not None and gold_of[group].sum() >= LEAST_TOKENS:
            tables = gold_of[group], self.gold.sum(axis=0), self.gold[(home == group) & (self.counts > 0)].sum(axis=0)
            for place, part in enumerate(self.parts):
                shares = [float(table[place] / max(table.sum(), 1)) for table in tables]
                found.append(Name(PARTS_OF_SPEECH.get(part, part), *shares))
        best = max(found, key=_says, default=Name("mixed"))
        if inside.sum() < LEAST_TOKENS or _says(best) <= 0:
            most = max(found, key=lambda name: name.covers * (name.covers > name.chance), default=Name("mixed"))
            return Name("mixed", most.covers, most.chance, most.lookup)
        return best

    def _candidates(self, inside: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Names, and which tokens each fits, bool ``(vocabulary,)``; of two that say as much the first is taken."""
        by_kind = np.bincount(self.kind_of[self.seen], weights=inside[self.seen], minlength=len(self.kinds))
        order = np.argsort(-by_kind, kind="stable")[:KINDS]
        order = order[by_kind[order] >= LISTED * inside.sum()]
        for count in range(1, len(order) + 1):
            chosen = [int(kind) for kind in order[:count]]
            yield _listed([self.kinds[kind] for kind in chosen]), np.isin(self.kind_of, chosen)
        yield from self._endings(by_kind)
        for place, of_profile in enumerate(PROFILE):
            if of_profile in _PROPERTIES:
                yield _PROPERTIES[of_profile], self.profiles[:, place]

    def _endings(self, by_kind: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        words = [(kind, self.kinds[kind]) for kind in by_kind.nonzero()[0] if self.kinds[kind].isalpha()]
        for length in (4, 3, 2):  # of endings that fit the same tokens, the longest: -ing rather than -ng
            totals: dict[str, float] = {}
            kinds: dict[str, int] = {}
            for kind, word in words:
                if len(word) >= length:
                    ending = word[-length:]
                    totals[ending] = totals.get(ending, 0.0) + by_kind[kind]
                    kinds[ending] = kinds.get(ending, 0) + 1
            best = max((ending for ending in totals if kinds[ending] > KINDS), key=lambda e: totals[e], default=None)
            if best is not None:
                fitting = [kind for kind, word in enumerate(self.kinds) if word.isalpha() and word.endswith(best)]
                yield f"words ending in -{best}", np.isin(self.kind_of, fitting)


def _says(name: Name) -> float:
    """How much a name says, in nats: Kullback-Leibler divergence of its share in the group from that in the text; 0
    where it fits too few."""
    p, q = min(name.covers, 1 - 1e-6), min(max(name.chance, 1e-9), 1 - 1e-6)
    if name.covers < COVERS or p < LIFT * q:
        return 0.0
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def _share(fits: np.ndarray, weights: np.ndarray) -> float:
    return float(weights[fits].sum() / max(int(weights.sum()), 1))


def _listed(kinds: list[str]) -> str:
    called = [_SIGNS.get(kind, f"“{display(kind, 16)}”") for kind in kinds]
    return called[0] if len(called) == 1 else f"{', '.join(called[:-1])} and {called[-1]}"
