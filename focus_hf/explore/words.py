"""What a head does, in words, from what it was seen to read; and which of its groups matter.

Groups have the names of the adapter's report where it has them, else such as fit what they hold on the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..attention import Pattern
from ..interpret.agreement import count_table
from ..interpret.naming import Namer
from ..interpret.reading import RESTS
from ..interpret.tokens import display
from ..records.group_facts import NAMELESS, shortest_stretch
from .data import ExplorerData, Head

#: Groups of a head that have a colour on the page; typical tokens of a group, and those by which it is called where
#: no name fits.
SHOWN, TYPICAL, CALLED_BY = 8, 6, 2

#: A head that pays less of its attention to far tokens is said to stay near.
LEAST_FAR = 0.02


@dataclass(frozen=True)
class GroupWords:
    """A group that a head reads more than its size alone would make it. Shares are rounded to four digits.

    Args:
        group: its number.
        name: by its tokens.
        tokens: those typical of it.
        size: share of the page's tokens that are in it.
        weight: share of the head's far attention that it gets.
        distance: where it is read.
    """

    group: int
    name: str
    tokens: list[str]
    size: float
    weight: float
    distance: str


@dataclass(frozen=True)
class HeadWords:
    """A head in words.

    Args:
        sentence: what it does.
        far: share of its attention that is far, mean over tokens that have far tokens before them.
        rests: tokens where it rests, see `RESTS`.
        interest: how much there is to see: the share that is far and no rest, times the Kullback-Leibler divergence
            (nats) of it by group from the groups' sizes, times its entropy (nats) by kinds of tokens (a head that only
            looks for "the" says little), over one more than the tokens on which it rests.
        groups: those that matter, the one that adds most to the divergence first.
    """

    sentence: str
    far: float
    rests: list[int]
    interest: float
    groups: list[GroupWords]


class PageWords:
    """Describes the heads of a page."""

    def __init__(self, data: ExplorerData) -> None:
        self.pattern, self.reported = data.pattern, data.names
        begun = np.repeat(data.starts, np.diff([*data.starts, len(data.tokens)]))
        self.has_far = np.arange(len(begun)) - begun > data.pattern.local_window + data.pattern.sink_tokens
        texts, self.ids, self.counts = np.unique(
            np.array(data.tokens, dtype=object), return_inverse=True, return_counts=True
        )
        self.texts: list[str] = texts.tolist()
        self.namer = Namer(self.texts, self.texts, self.counts)

    def of(self, head: Head) -> HeadWords:
        """Describe a head."""
        far = float(head.far[self.has_far].mean()) if self.has_far.any() else 0.0
        received = head.received.sum(axis=1)
        mean = received / np.maximum(head.places.sum(axis=1), 1)
        by_token = np.where(mean < RESTS, far * _shares(received), 0.0)
        sought, kinds = float(by_token.sum()), _shares(np.bincount(self.ids, weights=by_token))
        cells = by_cell(head, head.received * (mean < RESTS)[:, None])
        weight, places = _shares(cells.sum(axis=1)), _shares(by_cell(head, head.places).sum(axis=1))
        with np.errstate(divide="ignore", invalid="ignore"):
            excess = np.where(weight > 0, weight * np.log(weight / places), 0.0)
        order = [int(group) for group in np.argsort(-excess, kind="stable")[:SHOWN] if excess[group] > 0]
        counts = count_table(self.ids, head.groups, (len(self.texts), len(cells)))
        names = [name.name for name in self.namer.names(counts[:, order])] if order else []
        reported = self.reported.get(head.key, [])
        groups = []
        for group, fitting in zip(order, names, strict=True):
            tokens = self.typical(counts[:, group])
            called = ", ".join(f"“{token}”" for token in tokens[:CALLED_BY]) or "tokens"
            name = next(name for name in (*reported[group : group + 1], fitting, called) if name not in NAMELESS)
            size = round(int(counts[:, group].sum()) / len(self.ids), 4)
            distance = told_distance([group], cells, self.pattern)
            groups.append(GroupWords(group, name, tokens, size, round(float(weight[group]), 4), distance))
        entropy = -(kinds * np.log(np.maximum(kinds, 1e-12))).sum()
        rests = np.flatnonzero(mean >= RESTS).tolist()
        interest = float(sought * excess.sum() * entropy / (1 + len(rests)))
        chosen = [said for said in groups[:2] if excess[said.group] >= excess[order[0]] / 2]
        return HeadWords(self._sentence(far, sought, cells, chosen), far, rests, interest, groups)

    def typical(self, counts: np.ndarray) -> list[str]:
        """Tokens that are much more often in a group than elsewhere, and often."""
        here = counts.astype(float)
        expected = self.counts * here.sum() / len(self.ids)
        gain = np.where(here > 0, here * np.log(np.maximum(here, 1e-9) / np.maximum(expected, 1e-9)), -np.inf)
        order = [self.texts[place] for place in np.argsort(-gain, kind="stable") if here[place] > 0]
        return list(dict.fromkeys(text.strip() or display(text) for text in order if text))[:TYPICAL]

    def _sentence(self, far: float, sought: float, cells: np.ndarray, chosen: Sequence[GroupWords]) -> str:
        pattern = self.pattern
        where = f"the last {pattern.local_window:,} tokens" + (" and the first ones" if pattern.sink_tokens else "")
        if far < LEAST_FAR:
            return f"stays near: {100 * (1 - far):.1f} % of its attention is on {where}"
        if sought < LEAST_FAR:
            return f"rests: what it does not pay to {where} goes to a few tokens, whoever asks"
        if not chosen:
            return f"looks back, {told_distance(range(len(cells)), cells, pattern)}, at no group more than at others"
        names = " and ".join(dict.fromkeys(said.name for said in chosen))
        return f"looks back for {names}, {told_distance([said.group for said in chosen], cells, pattern)}"


def by_cell(head: Head, of_tokens: np.ndarray) -> np.ndarray:
    """Sums over the tokens of each group: ``(K, bands)`` from ``(T, bands)``."""
    cells = np.zeros((int(head.groups.max(initial=0)) + 1, of_tokens.shape[1]))
    np.add.at(cells, head.groups, of_tokens)
    return cells


def told_distance(groups: Sequence[int], cells: np.ndarray, pattern: Pattern) -> str:
    """Where most of the attention to some groups falls, as people say it."""
    return told_bands(*shortest_stretch(cells[list(groups)].sum(axis=0).tolist()), pattern)


def told_bands(first: int, last: int, pattern: Pattern) -> str:
    """Distances from one band to another."""
    starts = pattern.band_starts()
    nearest = max(pattern.local_window, 0) + 1 if first == 0 else starts[first] + 1
    if last == len(starts) - 1:
        return f"{nearest:,} or more tokens away"
    return f"{nearest:,} to {starts[last + 1]:,} tokens away"


def _shares(counts: np.ndarray) -> np.ndarray:
    shares: np.ndarray = counts / max(float(counts.sum()), 1e-12)
    return shares
