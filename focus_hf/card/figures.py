"""The picture of the dial: what is lost by how much is left out. Needs the extra ``focus-hf[viz]``."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

from ..files import save_figure
from ..records import Results
from ..records.pictures import DATA, digest
from ..records.results import OPPONENTS
from .summary import NOT_RIVALS

#: In the folder of an adapter.
DIAL = "figures/dial.png"

#: Colours of Focus, of the opponents that lose least, and of a window (Okabe and Ito's, which colour-blind eyes tell
#: apart), and dashes and marks of lengths.
_FOCUS, _RIVALS, _WINDOW = "#0072B2", ("#E69F00", "#009E73", "#CC79A7"), "#999999"
_DASHES, _MARKERS = ("-", "--", "-.", ":"), ("o", "s", "^", "D")

#: By length, by mode, by share asked for: mean share of pairs, mean excess.
Points = dict[int, dict[str, list[tuple[float, float]]]]


def dial_points(results: Results) -> Points:
    """Mean over texts of how many per cent perplexity is above dense attention's, against the share of pairs.

    By length and mode, the smallest share first; settings that were measured on every text that the length has.
    """
    measured = [(each, dense) for each in results.evaluations if (dense := each.perplexity("dense")) is not None]
    texts = Counter(each.context_length for each, _ in measured)
    found: dict[tuple[int, str, object], list[tuple[float, float]]] = defaultdict(list)
    for evaluation, dense in measured:
        for row in evaluation.rows:
            if row["mode"] == "hard" or row["mode"] in OPPONENTS:
                point = (100 * float(row["pairs"]), 100 * (float(row["perplexity"]) / dense - 1))
                found[evaluation.context_length, row["mode"], row.get("budget") or row.get("top_k")].append(point)
    points: Points = {length: {} for length, _, _ in sorted(found, key=lambda key: key[0])}
    for (length, mode, _), there in found.items():
        line = points[length].setdefault(mode, [])
        if len(there) == texts[length]:
            line.append((sum(x for x, _ in there) / len(there), sum(y for _, y in there) / len(there)))
            line.sort()
    return points


def dial_figure(results: Results, folder: Path) -> Path | None:
    """Draw it into an adapter's folder, a line for each length.

    Returns:
        Its path; ``None`` if nothing was measured that it could show, or matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    points = {length: modes for length, modes in dial_points(results).items() if modes.get("hard")}
    if not points:
        return None
    figure = Figure(figsize=(6.4, 5.4), dpi=180, layout="constrained")
    axis = figure.subplots()
    drawn = [("hard", "Focus", _FOCUS)]
    drawn += [(mode, OPPONENTS[mode], colour) for mode, colour in zip(_least(points), _RIVALS, strict=False)]
    drawn += [("window", OPPONENTS["window"], _WINDOW)]
    looks: list[dict[str, Any]] = [
        {"linestyle": dash, "marker": mark} for dash, mark in zip(_DASHES, _MARKERS, strict=True)
    ]
    for mode, _, colour in drawn:
        sizes = (2.5, 8) if mode == "hard" else (1.3, 5)
        for look, modes in zip(cycle(looks), points.values(), strict=False):
            if line := modes.get(mode):
                axis.plot(*zip(*line, strict=True), color=colour, linewidth=sizes[0], markersize=sizes[1], **look)
    _axes(axis)
    there = {mode for modes in points.values() for mode in modes}
    handles = [
        axis.plot([], [], color=colour, linewidth=3, label=name) for mode, name, colour in drawn if mode in there
    ]
    for look, length in zip(cycle(looks), points, strict=False):
        handles.append(axis.plot([], [], color="black", label=f"{length:,} tokens", **look))
    lines = [line for (line,) in handles]
    figure.legend(handles=lines, loc="outside lower center", ncols=2, fontsize=11, frameon=False)
    return save_figure(figure, folder / DIAL, {DATA: digest(dial_points(results))})


def _axes(axis: Any) -> None:
    """Logarithmic in both, and linear below one per cent, where a loss may be a gain."""
    from matplotlib.ticker import NullLocator

    shares, losses = ([value for line in axis.lines for value in line.get_data()[place]] for place in (0, 1))
    low, high = min(shares), max(shares)
    axis.set_xscale("log")
    ticks = (1, 2, 3, 5, 7, 10, 15, 20, 30, 40, 50, 70, 100)
    axis.set_xticks([tick for tick in ticks if low / 1.5 < tick < high * 1.5])
    room = 1.15 if high > 1.5 * low else 1.5  # around one share, so that two numbers stand beneath it
    axis.set_xlim(low / room, high * room)
    axis.set_yscale("symlog", linthresh=1.0)
    low, high = min(-0.2, min(losses) - 0.2), 1.4 * max(*losses, 1.0)
    axis.set_ylim(low, high)
    axis.set_yticks([mark for mark in (-1, 0, 0.5, 1, 2, 5, 10, 20, 50, 100, 200) if low <= mark <= high])
    for line in (axis.xaxis, axis.yaxis):
        line.set_major_formatter("{x:g}")
        line.set_minor_locator(NullLocator())
    axis.axhline(0, color="black", linewidth=1)
    axis.set_xlabel("pairs attended (%)", fontsize=12)
    axis.set_ylabel("perplexity above dense attention's (%)", fontsize=12)
    axis.tick_params(labelsize=11)
    axis.grid(alpha=0.3)


def _least(points: Points) -> list[str]:
    """The opponents that were measured most often, and of these that lose least, over all lengths and settings."""
    losses: dict[str, list[float]] = defaultdict(list)
    for modes in points.values():
        for mode, line in modes.items():
            if line and mode not in ("hard", *NOT_RIVALS):
                losses[mode] += [loss for _, loss in line]
    return sorted(losses, key=lambda mode: (-len(losses[mode]), fmean(losses[mode])))
