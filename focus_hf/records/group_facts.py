"""What one layer's groups hold and what its queries read, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

#: Names of groups that no name fits, and that hold no token.
NAMELESS = ("mixed", "empty")

#: Of the far attention to a group, what falls within the distances that are told of it.
MOST = 2 / 3


@dataclass
class GroupFacts:
    """One group of one layer.

    Args:
        share: of the tokens, by their first group.
        name: what its tokens have in common, as far as there is evidence; else one of `NAMELESS`.
        covers: share of its tokens that the name fits; of one that is mixed, what the best name found fits.
        chance: share of all tokens that the name fits: of a random group's, too.
        lookup: the same share of the group that a look-up by token would make of this one, see `contextual`.
        contextual: share of its tokens whose kind is mostly in another group: a look-up by token would put them there.
        top: most frequent tokens: ``token`` and ``count``.
        lifted: tokens that are here more often than elsewhere: ``token``, ``count``, ``lift`` (share of the token's
            occurrences that are here, over the group's share of all tokens).
        examples: ``before``, ``token``, ``after``; more of the groups that are read most.
    """

    share: float
    name: str = "mixed"
    covers: float = 0.0
    chance: float = 0.0
    lookup: float = 0.0
    contextual: float = 0.0
    top: list[dict[str, Any]] = field(default_factory=list)
    lifted: list[dict[str, Any]] = field(default_factory=list)
    examples: list[dict[str, str]] = field(default_factory=list)


@dataclass
class LayerFacts:
    """One layer, or one key/value head that routes by itself. Shares are 0 to 1.

    Args:
        name: of the attention module; of a head with its number behind it.
        groups: in order.
        contextual: share of tokens that are in another group than most of their kind; 0 is a look-up by token.
        agreement: with parts of speech (``upos``), see `focus_hf.interpret.agreement`: of the ``groups`` and of the
            baselines ``random`` and ``lookup``.
        reads: ``K x bands``: of the queries that have tokens at such a distance, the share that reads the group there.
        attention: ``K x bands``: the share of the head's attention that falls there.
        silent: of the queries that have distant tokens, the share that reads none of them.
        loss: by how many nats per token the model is worse if this head reads nothing far; ``None`` if not measured.
        loss_error: standard error of it, over tokens.
        split: tokens whose group depends on context: ``token``, ``counts`` by group, ``examples`` by group.
        pairs: distant pairs with most attention: ``weight`` (mean over query heads), ``distance``, ``group`` (of the
            key), ``query`` and ``key`` (each ``before``, ``token``, ``after``).
        strip: groups of the report's first tokens.
        head: which key/value head; ``None`` where the layer's heads share their groups.
    """

    name: str
    groups: list[GroupFacts]
    contextual: float
    agreement: dict[str, Any] = field(default_factory=dict)
    reads: list[list[float]] = field(default_factory=list)
    attention: list[list[float]] = field(default_factory=list)
    silent: float | None = None
    loss: float | None = None
    loss_error: float | None = None
    split: list[dict[str, Any]] = field(default_factory=list)
    pairs: list[dict[str, Any]] = field(default_factory=list)
    strip: list[int] = field(default_factory=list)
    head: int | None = None

    @property
    def title(self) -> str:
        """For people."""
        return self.name if self.head is None else f"{self.name.removesuffix(f'.{self.head}')}, head {self.head}"

    @property
    def numbers(self) -> list[str]:
        """The layer's number, if its name has one, and the head's."""
        return [part for part in self.name.split(".") if part.isdigit()]

    @property
    def short_title(self) -> str:
        """The same for people."""
        short = f"layer {self.numbers[0]}" if self.numbers else self.name[-16:]
        return short if self.head is None else f"{short}, head {self.head}"

    @property
    def told_loss(self) -> str:
        """Nats per token; empty if not measured."""
        return "" if self.loss is None else f"{self.loss:+.4f}"

    @property
    def told_silent(self) -> str:
        """In per cent; empty if not measured."""
        return "" if self.silent is None else f"{100 * self.silent:.0f} %"

    @property
    def nmi(self) -> list[float]:
        """Agreement with parts of speech of the groups, of random ones and of a look-up; empty for plain text."""
        found = self.agreement.get("upos")
        return [float(found[which]["nmi"]) for which in ("groups", "random", "lookup")] if found else []

    @property
    def largest(self) -> float:
        """Share of the largest group."""
        return max(group.share for group in self.groups)

    @property
    def far(self) -> float:
        """Share of its attention that goes to distant tokens."""
        return sum(map(sum, self.attention))

    def most_read(self, count: int, named: bool = True) -> list[int]:
        """The groups with most distant attention.

        Args:
            count: how many, at most.
            named: those that have a name, and of a name first the one that is read most: two groups of a name say
                little more than one.
        """
        far = [sum(row) for row in self.attention]
        order = sorted(range(len(far)), key=lambda group: -far[group])
        wanted = [g for g in order if far[g] > 0 and not (named and self.groups[g].name in NAMELESS)]
        if named:
            first = {self.groups[g].name: g for g in reversed(wanted)}
            wanted.sort(key=lambda g: first[self.groups[g].name] != g)
        return wanted[:count]

    def distances(self, group: int, starts: list[int]) -> tuple[int, int | None]:
        """Where a group is read: the shortest stretch of bands with `MOST` of its attention.

        Args:
            group: which.
            starts: distances at which the bands begin, see `GroupReport.bands`.

        Returns:
            From, and up to how many tokens back; ``None`` without a limit.
        """
        first, last = shortest_stretch(self.attention[group])
        return starts[first] + 1, starts[last + 1] if last + 1 < len(starts) else None


def shortest_stretch(by_band: Sequence[float]) -> tuple[int, int]:
    """The first and the last of the fewest bands next to each other with `MOST` of some attention, of several those
    with the most.

    Args:
        by_band: attention to each band.
    """
    bands, enough = range(len(by_band)), MOST * sum(by_band)
    found = []
    for first in bands:
        for last in bands[first:]:
            held = sum(by_band[first : last + 1])
            if held >= enough:
                found.append((last - first, -held, first, last))
    return min(found)[2:]
