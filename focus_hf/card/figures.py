"""The picture of the dial: what is lost by how much is left out. Needs the extra ``focus-hf[viz]``."""

from __future__ import annotations

import io
from collections import defaultdict
from pathlib import Path
from typing import Any

from ..files import write_atomically
from ..records import Results
from ..records.pictures import DATA, digest
from ..records.results import OPPONENTS

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

    Returns:
        By length and mode points, the smallest share first. A setting counts where it was measured on every text that
        the length has.
    """
    found: dict[int, dict[str, dict[object, list[tuple[float, float]]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    texts: dict[int, int] = defaultdict(int)
    for evaluation in results.evaluations:
        if (dense := evaluation.perplexity("dense")) is None:
            continue
        texts[evaluation.context_length] += 1
        for row in evaluation.rows:
            if row["mode"] == "hard" or row["mode"] in OPPONENTS:
                key = row.get("budget") or row.get("top_k")
                point = (100 * float(row["pairs"]), 100 * (float(row["perplexity"]) / dense - 1))
                found[evaluation.context_length][row["mode"]][key].append(point)
    return {
        length: {
            mode: sorted(
                (sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points))
                for points in by_setting.values()
                if len(points) == texts[length]
            )
            for mode, by_setting in modes.items()
        }
        for length, modes in sorted(found.items())
    }


def dial_figure(results: Results, folder: Path) -> Path | None:
    """Draw it, a line for each length.

    Args:
        results: of an adapter.
        folder: the adapter's.

    Returns:
        Its path; ``None`` if nothing was measured that it could show, or matplotlib is missing.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = {length: modes for length, modes in dial_points(results).items() if modes.get("hard")}
    if not points:
        return None
    figure, axis = pyplot.subplots(figsize=(6.4, 5.4), dpi=180, layout="constrained")
    drawn = [("hard", "Focus", _FOCUS)]
    drawn += [(mode, OPPONENTS[mode], colour) for mode, colour in zip(_least(points), _RIVALS, strict=False)]
    drawn += [("window", OPPONENTS["window"], _WINDOW)]
    ends = [
        _line(axis, place, points[length], mode, colour)
        for mode, _, colour in drawn
        for place, length in enumerate(points)
    ]
    there = {mode for modes in points.values() for mode in modes}
    handles = [
        axis.plot([], [], color=colour, linewidth=3, label=name)[0] for mode, name, colour in drawn if mode in there
    ]
    handles += [
        axis.plot(
            [], [], color="black", linestyle=_DASHES[place % 4], marker=_MARKERS[place % 4], label=f"{length:,} tokens"
        )[0]
        for place, length in enumerate(points)
    ]
    _axes(axis, [end for end in ends if end])
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=11, frameon=False)
    content = io.BytesIO()
    figure.savefig(
        content, format="png", facecolor="white", metadata={"Software": None, DATA: digest(dial_points(results))}
    )
    pyplot.close(figure)
    write_atomically(folder / DIAL, content.getvalue())
    return folder / DIAL


def _line(axis: Any, place: int, modes: dict[str, list[tuple[float, float]]], mode: str, colour: str) -> list[float]:
    """Draw one mode at one length; gives its shares of pairs."""
    if not (points := modes.get(mode)):
        return []
    xs, ys = zip(*points, strict=True)
    axis.plot(
        *(xs, ys),
        linestyle=_DASHES[place % 4],
        marker=_MARKERS[place % 4],
        color=colour,
        linewidth=2.5 if mode == "hard" else 1.3,
        markersize=8 if mode == "hard" else 5,
    )
    return list(xs)


def _axes(axis: Any, shares: list[list[float]]) -> None:
    """Logarithmic in both, and linear below one per cent, where a loss may be a gain."""
    every = [share for line in shares for share in line]
    axis.set_xscale("log")
    ticks = [
        tick for tick in (1, 2, 3, 5, 7, 10, 15, 20, 30, 40, 50, 70, 100) if min(every) / 1.5 < tick < max(every) * 1.5
    ]
    axis.set_xticks(ticks, [f"{tick}" for tick in ticks])
    axis.set_xticks([], minor=True)
    room = 1.15 if max(every) > 1.5 * min(every) else 1.5  # around one share, so that two numbers stand beneath it
    axis.set_xlim(min(every) / room, max(every) * room)
    axis.set_yscale("symlog", linthresh=1.0)
    losses = [value for line in axis.lines for value in line.get_ydata()]
    low, high = min(-0.2, min(losses) - 0.2), 1.4 * max(*losses, 1.0)
    axis.set_ylim(low, high)
    marks = [mark for mark in (-1, 0, 0.5, 1, 2, 5, 10, 20, 50, 100, 200) if low <= mark <= high]
    axis.set_yticks(marks, [f"{mark:g}" for mark in marks])
    axis.set_yticks([], minor=True)
    axis.axhline(0, color="black", linewidth=1)
    axis.set_xlabel("pairs attended (%)", fontsize=12)
    axis.set_ylabel("perplexity above dense attention's (%)", fontsize=12)
    axis.tick_params(labelsize=11)
    axis.grid(alpha=0.3)


def _least(points: Points) -> list[str]:
    """The opponents that lose least, over all lengths and settings."""
    losses: dict[str, list[float]] = defaultdict(list)
    for modes in points.values():
        for mode, found in modes.items():
            if mode not in ("hard", "window", "random", "oracle"):
                losses[mode] += [loss for _, loss in found]
    return sorted((mode for mode in losses if losses[mode]), key=lambda mode: sum(losses[mode]) / len(losses[mode]))[
        : len(_RIVALS)
    ]
