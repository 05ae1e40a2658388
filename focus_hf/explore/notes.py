"""What is known about groups: what the adapter's own report says, and which groups of two sides are the same."""

from __future__ import annotations

from collections.abc import Sequence

from ..interpret import GroupReport, match_groups
from .data import GroupNote, Side

#: Typical tokens shown of a group.
SHOWN = 6


def plain(layer: str) -> str:
    """A layer's name without what PEFT puts before it, so that names agree however a model was made."""
    return layer.removeprefix("base_model.model.")


def group_notes(report: GroupReport, layers: Sequence[str], num_groups: int, adapter: str) -> list[list[GroupNote]]:
    """A report's labels, shares and typical tokens, for the layers named; none for heads that it leaves out.

    Raises:
        ValueError: the report is of another adapter.
    """
    if report.num_groups != num_groups:
        raise ValueError(
            f"The group report of {adapter} is about {report.num_groups} groups, but there are {num_groups}. "
            "Make it again: focus-hf groups --adapter ... --write"
        )
    by_name = {plain(layer.name): layer for layer in report.layers}
    missing = [name for name in layers if name not in by_name]
    if len(missing) > report.heads_left_out:
        raise ValueError(
            f"The group report of {adapter} says nothing about {missing[0]}. "
            "Make it again: focus-hf groups --adapter ... --write"
        )
    return [
        [
            GroupNote(
                str(group.label),
                float(group.share),
                [str(item["token"]) for item in (group.lifted[:SHOWN] or group.top[:SHOWN])],
            )
            for group in (by_name[name].groups if name in by_name else [])
        ]
        for name in layers
    ]


def match_sides(sides: Sequence[Side], *, same_groups: bool) -> None:
    """Give groups that hold the same tokens on both sides the same colour.

    Args:
        sides: one or two; their ``colours`` and ``overlaps`` are set.
        same_groups: both are of one adapter, whose groups match themselves.
    """
    first = sides[0]
    for side in sides:
        side.colours = [list(range(side.num_groups)) for _ in side.layers]
    if same_groups or len(sides) == 1:
        return
    second = sides[1]
    second.overlaps = []
    for number, (one, two) in enumerate(zip(first.layers, second.layers, strict=True)):
        colours, overlaps = [-1] * second.num_groups, [-1.0] * second.num_groups
        for match in match_groups(one.groups[:, 0], two.groups[:, 0], first.num_groups, second.num_groups):
            colours[match.other], overlaps[match.other] = match.group, match.overlap
        new = iter(range(first.num_groups, first.num_groups + second.num_groups))
        second.colours[number] = [next(new) if colour < 0 else colour for colour in colours]
        second.overlaps.append(overlaps)
