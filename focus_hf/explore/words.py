"""What a head does, in words, from what it was seen to read; and which of its groups matter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..attention import Pattern
from ..interpret.reading import RESTS
from .data import ExplorerData, Head
from .names import GroupNames

#: Groups of a head that have a colour on the page.
SHOWN = 8

#: A head that pays less of its attention to far tokens is said to stay near.
LEAST_FAR = 0.02

#: Share of the far attention that the distances told of a head must hold.
MOST = 2 / 3


@dataclass(frozen=True)
class GroupWords:
    """A group that a head reads more than its size alone would make it.

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
            looks for "the" says little), and the less of all that the more tokens the head rests on.
        groups: those that matter, the one that adds most to the divergence first.
    """

    sentence: str
    far: float
    rests: list[int]
    interest: float
    groups: list[GroupWords]


def all_words(data: ExplorerData) -> list[HeadWords]:
    """The heads of a page, described."""
    begun = np.zeros(len(data.tokens), dtype=np.int64)
    for start in data.starts:
        begun[start:] = start
    places, names = np.arange(len(data.tokens)) - begun, GroupNames(data.tokens, data.names)
    return [head_words(head, places, names, data.pattern) for head in data.heads]


def head_words(head: Head, positions: np.ndarray, names: GroupNames, pattern: Pattern) -> HeadWords:
    """Describe a head.

    Args:
        head: as it was seen to read.
        positions: of the page's tokens in their windows, ``(T,)``.
        names: of groups.
        pattern: with the bands by which distances are told.
    """
    has_far = positions > pattern.local_window + pattern.sink_tokens
    far = float(head.far[has_far].mean()) if has_far.any() else 0.0
    mean = head.received.sum(axis=1) / np.maximum(head.places.sum(axis=1), 1)
    by_token = np.where(mean < RESTS, far * _shares(head.received.sum(axis=1)), 0.0)
    sought, kinds = by_token.sum(), _shares(np.bincount(names.ids, weights=by_token))
    cells = by_cell(head, head.received * (mean < RESTS)[:, None])
    weight, places = _shares(cells.sum(axis=1)), _shares(by_cell(head, head.places).sum(axis=1))
    with np.errstate(divide="ignore", invalid="ignore"):
        excess = np.where(weight > 0, weight * np.log(weight / places), 0.0)
    order = [int(group) for group in np.argsort(-excess, kind="stable")[:SHOWN] if excess[group] > 0]
    typical = [names.typical(head, group) for group in order]
    sizes = np.bincount(head.groups, minlength=len(weight)) / max(len(positions), 1)
    groups = [
        GroupWords(
            group=group,
            name=name,
            tokens=tokens,
            size=float(sizes[group]),
            weight=float(weight[group]),
            distance=told_distance([group], cells, pattern),
        )
        for group, name, tokens in zip(order, names.names(head, order, typical), typical, strict=True)
    ]
    sentence = _sentence(far, float(sought), cells, order, groups, excess, pattern)
    rests = [int(token) for token in np.flatnonzero(mean >= RESTS)]
    entropy = -(kinds * np.log(np.maximum(kinds, 1e-12))).sum()
    return HeadWords(sentence, far, rests, float(sought * excess.sum() * entropy / (1 + len(rests))), groups)


def by_cell(head: Head, of_tokens: np.ndarray) -> np.ndarray:
    """Sums over the tokens of each group: ``(K, bands)`` from ``(T, bands)``."""
    cells = np.zeros((int(head.groups.max(initial=0)) + 1, of_tokens.shape[1]))
    np.add.at(cells, head.groups, of_tokens)
    return cells


def _sentence(
    far: float,
    sought: float,
    cells: np.ndarray,
    order: list[int],
    groups: list[GroupWords],
    excess: np.ndarray,
    pattern: Pattern,
) -> str:
    where = f"the last {pattern.local_window:,} tokens" + (" and the first ones" if pattern.sink_tokens else "")
    if far < LEAST_FAR:
        return f"stays near: {100 * (1 - far):.1f} % of its attention is on {where}"
    if sought < LEAST_FAR:
        return f"rests: what it does not pay to {where} goes to a few tokens, whoever asks"
    if not order:
        return f"looks back, {told_distance(range(len(cells)), cells, pattern)}, at no group more than at others"
    chosen = [group for group in order[:2] if excess[group] >= excess[order[0]] / 2]
    names = dict.fromkeys(said.name for said in groups[: len(chosen)])
    return f"looks back for {' and '.join(names)}, {told_distance(chosen, cells, pattern)}"


def told_distance(groups: Sequence[int], cells: np.ndarray, pattern: Pattern) -> str:
    """The shortest run of bands that holds most of the attention to some groups, as people say it."""
    by_band = _shares(cells[list(groups)].sum(axis=0))
    bands = range(len(by_band))
    runs = [(last - first, first, last) for first in bands for last in bands if first <= last]
    _, first, last = min(run for run in runs if by_band[run[1] : run[2] + 1].sum() >= min(MOST, by_band.sum()))
    return told_bands(first, last, pattern)


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
