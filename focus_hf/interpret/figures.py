"""Pictures of a group report: what a head reads, by group and distance. Needs the extra ``focus-hf[viz]``.

White ground, a number beside every colour, and colours that colour-blind eyes tell apart, so that a picture can be
read on a dark page, in print, and without colour.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from ..files import save_figure
from ..records.group_facts import LayerFacts
from ..records.group_markdown import HEADS, picture, picture_data
from ..records.group_report import GroupReport
from ..records.pictures import DATA, digest

#: Groups drawn, those that are read most; the others are one row.
_GROUPS = 8


def save_plots(report: GroupReport, folder: str | os.PathLike[str]) -> list[Path]:
    """Write a picture of each head that the report tells one by one.

    Args:
        report: its data.
        folder: what a card's links start from: pictures go to ``figures`` in it.

    Returns:
        The paths; none where no window was long enough to see what is read.
    """
    return [head_figure(layer, report.bands, Path(folder) / picture(layer)) for layer in report.that_matter(HEADS)]


def head_figure(layer: LayerFacts, bands: Sequence[int], path: Path) -> Path:
    """Of one head: the share of its attention that falls on each group at each distance, in per cent; beside each
    group how many of the queries read it, at the distance at which most do."""
    from matplotlib.figure import Figure

    rows = layer.most_read(_GROUPS, named=False)
    attention, reads = np.array(layer.attention), np.array(layer.reads)
    others = [group for group in range(len(attention)) if group not in rows]
    values = 100 * attention[rows]
    labels = [f"{_called(layer, group)}\nread by {100 * reads[group].max():.0f} %" for group in rows]
    if others:
        values = np.concatenate([values, 100 * attention[others].sum(axis=0, keepdims=True)])
        labels.append(f"{len(others)} other groups")
    size = 3.2 + 0.8 * max(len(bands), 3), 1.2 + 0.46 * len(labels)
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    axis = figure.subplots()
    axis.imshow(values, cmap="cividis", vmin=0, vmax=max(float(values.max()), 1e-9), aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        bright = value > 0.6 * values.max()
        shown = f"{value:.1f}" if value >= 0.05 else "·"
        axis.text(column, row, shown, ha="center", va="center", fontsize=9, color="k" if bright else "w")
    axis.set_yticks(range(len(labels)), labels, fontsize=9)
    distances = [*(f"{start + 1:,}\nto {end:,}" for start, end in pairwise(bands)), f"{bands[-1] + 1:,}\nand more"]
    axis.set_xticks(range(len(bands)), distances, fontsize=9)
    axis.set_xlabel("tokens back")
    axis.set_title(f"{_plain(layer.short_title)}: attention by group and distance (%)", fontsize=10)
    return save_figure(figure, path, {DATA: digest(picture_data(layer))})


def _called(layer: LayerFacts, group: int) -> str:
    """A group's name; of one that has none its most typical tokens."""
    facts = layer.groups[group]
    tokens = " ".join(str(item["token"])[:10] for item in (facts.lifted or facts.top)[:3])
    return _plain(f"mixed: {tokens}" if facts.name == "mixed" else facts.name)


def _plain(text: str) -> str:
    """No mathematics in strangers' text."""
    return text.replace("$", r"\$")
