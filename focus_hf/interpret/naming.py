"""Names of groups, by evidence: what at least half of a group's tokens have in common, and few others.

Candidates are gold categories (of a treebank), properties of a token's text, endings of words, and the group's own
most frequent kinds of tokens. Of those that fit at least half of the group, the one is taken that says most about it:
the divergence between the share that fits in the group and the share that fits in the text. "names" at 90 % and 5 %
says more than "capitalised words" at 95 % and 15 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .tokens import PROPERTIES, display, properties

#: A name must fit this share of a group's tokens, and this much more of them than of all tokens.
COVERS, LIFT = 0.5, 2.0

#: A group of fewer tokens has no name: too little is known about it.
LEAST_TOKENS = 20

#: Words that a name may list; an ending must be that of more.
LONGEST_LIST = 3

#: A word that a name lists has this share of the group's tokens at least.
LISTED = 0.1

#: Universal Dependencies' parts of speech and the kinds of words in code (`source_code`), as people call them.
PARTS_OF_SPEECH = {
    "ADJ": "adjectives", "ADP": "prepositions", "ADV": "adverbs", "AUX": "auxiliary verbs",
    "CCONJ": "conjunctions", "DET": "articles and determiners", "INTJ": "interjections", "NOUN": "nouns",
    "NUM": "numbers", "PART": "particles", "PRON": "pronouns", "PROPN": "names", "PUNCT": "punctuation",
    "SCONJ": "subordinating conjunctions", "SYM": "symbols", "VERB": "verbs",
    "ATTRIBUTE": "attributes", "CALL": "names of what is called", "CLOSE": "closing brackets",
    "COMMENT": "comments", "DEFINITION": "names of what is defined", "IMPORT": "names of imports",
    "INDENT": "indentation", "KEYWORD": "keywords", "NEWLINE": "line breaks", "NUMBER": "numbers",
    "OPEN": "opening brackets", "OPERATOR": "operators", "PARAMETER": "parameters", "STRING": "strings",
    "TARGET": "variables that are assigned", "VARIABLE": "variables that are read",
}  # fmt: skip

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
    """Names groups of one text, whose tokens are of some kinds.

    Args:
        texts, raw: of each kind, decoded and as the vocabulary writes it.
        counts: of each kind in the text, ``(kinds,)``.
        gold: counts ``(kinds, parts of speech)`` in the text, where it has them.
        parts: their names.
    """

    def __init__(
        self,
        texts: Sequence[str],
        raw: Sequence[str],
        counts: np.ndarray,
        gold: np.ndarray | None = None,
        parts: Sequence[str] = (),
    ) -> None:
        self.counts, self.gold, self.parts = counts, gold, parts
        held = list(map(properties, texts, raw))
        self.properties = {name: np.array([name in one for one in held], dtype=bool) for name in PROPERTIES}
        bare = [text.strip().lower() or text for text in texts]
        self.words = list(dict.fromkeys(bare))  # however they are written
        number = {word: place for place, word in enumerate(self.words)}
        self.word_of = np.array([number[word] for word in bare], dtype=np.int64)
        self.alphabetic = [(place, word) for word, place in number.items() if word.isalpha()]

    def names(self, by_token: np.ndarray, gold_of: np.ndarray | None = None) -> list[Name]:
        """The name of each group.

        Args:
            by_token: counts ``(kinds, K)``.
            gold_of: counts ``(K, parts of speech)``, of a text that has them.
        """
        home = by_token.argmax(axis=1)  # of a look-up by token
        return [
            self._name(by_token[:, group], home == group, None if gold_of is None else gold_of[group])
            for group in range(by_token.shape[1])
        ]

    def _name(self, inside: np.ndarray, at_home: np.ndarray, gold_of: np.ndarray | None) -> Name:
        if not inside.any():
            return Name("empty")
        weights = inside, self.counts, np.where(at_home, self.counts, 0)
        found = [Name(name, *(_share(of[fits], of) for of in weights)) for name, fits in self._candidates(inside)]
        if gold_of is not None and self.gold is not None and gold_of.sum() >= LEAST_TOKENS:
            tables = gold_of, self.gold.sum(axis=0), self.gold[at_home].sum(axis=0)
            found += [
                Name(PARTS_OF_SPEECH.get(part, part), *(_share(table[place], table) for table in tables))
                for place, part in enumerate(self.parts)
            ]
        best = max(found, key=_says, default=Name("mixed"))
        if inside.sum() >= LEAST_TOKENS and _says(best) > 0:
            return best
        most = max(found, key=lambda name: name.covers * (name.covers > name.chance), default=Name("mixed"))
        return replace(most, name="mixed")

    def _candidates(self, inside: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Names, and which kinds each fits, bool ``(kinds,)``; of two that say as much the first is taken."""
        by_word = np.bincount(self.word_of, weights=inside)
        order = np.argsort(-by_word, kind="stable")[:LONGEST_LIST]
        order = order[by_word[order] >= LISTED * inside.sum()]
        for count in range(1, len(order) + 1):
            yield _listed([self.words[word] for word in order[:count]]), np.isin(self.word_of, order[:count])
        yield from self._endings(by_word)
        yield from self.properties.items()

    def _endings(self, by_word: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        for length in (4, 3, 2):  # of endings that fit the same tokens, the longest: -ing rather than -ng
            by_ending: dict[str, list[int]] = {}
            for number, word in self.alphabetic:
                if by_word[number] and len(word) >= length:
                    by_ending.setdefault(word[-length:], []).append(number)
            several = {ending: by_word[some].sum() for ending, some in by_ending.items() if len(some) > LONGEST_LIST}
            if several:
                best = max(several, key=lambda ending: several[ending])
                fitting = [number for number, word in self.alphabetic if word.endswith(best)]
                yield f"words ending in -{best}", np.isin(self.word_of, fitting)


def _says(name: Name) -> float:
    """How much a name says, in nats: Kullback-Leibler divergence of its share in the group from that in the text; 0
    where it fits too few."""
    p, q = min(name.covers, 1 - 1e-6), min(max(name.chance, 1e-9), 1 - 1e-6)
    if name.covers < COVERS or p < LIFT * q:
        return 0.0
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def _share(part: np.ndarray, whole: np.ndarray) -> float:
    return float(part.sum() / max(int(whole.sum()), 1))


def _listed(kinds: list[str]) -> str:
    called = [_SIGNS.get(kind, f"“{display(kind, 16)}”") for kind in kinds]
    return called[0] if len(called) == 1 else f"{', '.join(called[:-1])} and {called[-1]}"
