"""Groups by name: the adapter's report's names where it has them, else by what they hold on the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..interpret.naming import Namer
from ..interpret.tokens import profile
from ..records.group_facts import NAMELESS
from .data import Head

#: Typical tokens by which a group without a name is called.
CALLED_BY = 2


class GroupNames:
    """Names the groups of a page's heads.

    Args:
        tokens: of the page.
        reported: for heads by `Head.key` the names of their groups in the adapter's report.
    """

    def __init__(self, tokens: Sequence[str], reported: Mapping[str, Sequence[str]]) -> None:
        self.reported = reported
        self.texts = sorted(set(tokens))
        number = {text: place for place, text in enumerate(self.texts)}
        self.ids = np.array([number[token] for token in tokens], dtype=np.int64)
        self.counts = np.bincount(self.ids, minlength=len(self.texts))
        profiles = np.array([profile(text, text) for text in self.texts])
        self.namer = Namer(dict(enumerate(self.texts)), profiles, self.counts)

    def names(self, head: Head, groups: Sequence[int], typical: Sequence[Sequence[str]]) -> list[str]:
        """What some groups of a head are called.

        Args:
            head: whose.
            groups: which.
            typical: tokens of each, for those that have no name.
        """
        by_token = np.stack([self.counts_of(head, group) for group in groups], axis=1) if groups else None
        found = [] if by_token is None else [name.name for name in self.namer.names(by_token)]
        reported = self.reported.get(head.key, ())
        names = []
        for place, group in enumerate(groups):
            name = reported[group] if group < len(reported) else NAMELESS[0]
            name = found[place] if name in NAMELESS else name
            names.append(called_by(typical[place]) if name in NAMELESS else name)
        return names

    def counts_of(self, head: Head, group: int) -> np.ndarray:
        """How often each text is in a group."""
        return np.bincount(self.ids[head.groups == group], minlength=len(self.texts))

    def typical(self, head: Head, group: int, count: int = 6) -> list[str]:
        """Tokens that are much more often in a group than elsewhere, and often."""
        here = self.counts_of(head, group).astype(float)
        expected = self.counts * here.sum() / max(len(self.ids), 1)
        gain = np.where(here > 0, here * np.log(np.maximum(here, 1e-9) / np.maximum(expected, 1e-9)), -np.inf)
        order = [int(place) for place in np.argsort(-gain, kind="stable") if here[place] > 0 and self.texts[place]]
        return list(dict.fromkeys(visible_spaces(self.texts[place]) for place in order))[:count]


def called_by(typical: Sequence[str]) -> str:
    """A group by its tokens."""
    return ", ".join(f"“{token}”" for token in typical[:CALLED_BY]) or "tokens"


def visible_spaces(token: str) -> str:
    """A token without the spaces around it; of nothing but spaces, with them to be seen."""
    return token.strip() or token.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")
