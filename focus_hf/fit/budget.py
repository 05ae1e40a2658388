"""Where a budget of pairs is spent: one option for each head, so that the sum of costs is small."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

from .costs import Cost, Option

Head = TypeVar("Head", bound=Hashable)


def choose(table: Mapping[Head, Mapping[Option, Cost]], budget: float) -> dict[Head, Option]:
    """The options for all heads whose mean share of pairs keeps within a budget.

    Every head starts with its cheapest option and moves along the lower convex hull of its options, those steps first
    that save most per pair. Up to where the budget ends this is what a Lagrange multiplier on pairs would choose
    (Everett, Operations Research 11(3), 1963): no other choice with as few pairs has a smaller sum. What is left is
    then spent on the steps that still fit.

    Args:
        table: for every head the cost of each option.
        budget: mean share of pairs over all heads, 0 to 1.

    Raises:
        ValueError: even the cheapest options take more.
    """
    chosen: dict[Head, Option] = {}
    steps: list[tuple[float, int, Head, Option, float]] = []
    for number, (head, options) in enumerate(table.items()):
        hull = lower_hull(options)
        chosen[head] = hull[0]
        for option, following in zip(hull, hull[1:], strict=False):
            pairs = options[following].pairs - options[option].pairs
            steps.append(((options[option].loss - options[following].loss) / pairs, number, head, following, pairs))
    total = budget * len(table)
    spent = sum(table[head][option].pairs for head, option in chosen.items())
    if spent > total:
        raise ValueError(
            f"pairs={budget:g} is too small: the cheapest options take {spent / len(table):.3g} of all. Use more."
        )
    stopped: set[Head] = set()  # at a step that did not fit: those behind it would skip it
    for _, _, head, option, pairs in sorted(steps, key=lambda step: (-step[0], step[1])):
        if head not in stopped and spent + pairs <= total:
            chosen[head], spent = option, spent + pairs
        else:
            stopped.add(head)
    return chosen


def choose_alike(table: Mapping[Head, Mapping[Option, Cost]], budget: float) -> dict[Head, Option]:
    """The one option for all heads that keeps within a budget and costs least.

    Raises:
        ValueError: every option takes more.
    """
    choices = [dict.fromkeys(table, option) for option in set.intersection(*map(set, table.values()))]
    affordable = [choice for choice in choices if mean_pairs(table, choice) <= budget]
    if not affordable:
        raise ValueError(f"pairs={budget:g} is too small: no option for all heads takes as little. Use more.")
    return min(affordable, key=lambda choice: total_loss(table, choice))


def lower_hull(options: Mapping[Option, Cost]) -> list[Option]:
    """The options on the lower convex hull of loss over pairs, from the fewest pairs to the smallest loss."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda option: (options[option].pairs, options[option].loss)):
        if hull and options[option].loss >= options[hull[-1]].loss:
            continue
        while len(hull) > 1 and _above(options[hull[-2]], options[hull[-1]], options[option]):
            hull.pop()
        hull.append(option)
    return hull


def _above(first: Cost, middle: Cost, last: Cost) -> bool:
    """Whether the middle one lies on or above the line between the others."""
    return (middle.loss - first.loss) * (last.pairs - first.pairs) >= (last.loss - first.loss) * (
        middle.pairs - first.pairs
    )


def mean_pairs(table: Mapping[Head, Mapping[Option, Cost]], chosen: Mapping[Head, Option]) -> float:
    """Share of pairs of a choice."""
    return sum(table[head][option].pairs for head, option in chosen.items()) / max(1, len(chosen))


def total_loss(table: Mapping[Head, Mapping[Option, Cost]], chosen: Mapping[Head, Option]) -> float:
    """Sum of the costs of a choice."""
    return sum(table[head][option].loss for head, option in chosen.items())
