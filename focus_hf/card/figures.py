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

#: Opponents drawn besides a window: those that lose least.
_RIVALS = 2

#: Shape and colour (Okabe and Ito's, which colour-blind eyes tell apart).
_FOCUS, _WINDOW = ("o", "#0072B2"), ("v", "#999999")
_OTHERS = (("s", "#E69F00"), ("D", "#009E73"))

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
    """Draw it, a panel for each of at most four lengths.

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
    lengths = list(points)[-4:]
    columns = min(2, len(lengths))
    rows = -(-len(lengths) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4.8 * columns, 3.3 * rows + 0.7), dpi=120, layout="constrained", squeeze=False
    )
    others = _least(points)
    for axis, length in zip(axes.ravel(), lengths, strict=False):
        _panel(axis, length, points[length], others)
    for axis in axes.ravel()[len(lengths) :]:
        axis.axis("off")
    handles: dict[str, Any] = {}
    for axis in axes.ravel():
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, fontsize=11, frameon=False)
    content = io.BytesIO()
    figure.savefig(content, format="png", facecolor="white", metadata={"Software": None, DATA: digest(points)})
    pyplot.close(figure)
    write_atomically(folder / DIAL, content.getvalue())
    return folder / DIAL


def _panel(axis: Any, length: int, modes: dict[str, list[tuple[float, float]]], others: list[str]) -> None:
    drawn = [("hard", "Focus", *_FOCUS)]
    drawn += [(mode, OPPONENTS[mode], *style) for mode, style in zip(others, _OTHERS, strict=False)]
    drawn += [("window", OPPONENTS["window"], *_WINDOW)]
    for mode, name, marker, colour in drawn:
        if points := modes.get(mode):
            xs, ys = zip(*points, strict=True)
            width = 2.5 if mode == "hard" else 1.5
            axis.plot(xs, ys, marker=marker, color=colour, label=name, linewidth=width, markersize=7)
    axis.axhline(0, color="black", linewidth=1)
    axis.set_title(f"{length:,} tokens", fontsize=12)
    axis.set_xlabel("pairs attended (%)", fontsize=11)
    axis.set_ylabel("perplexity above dense (%)", fontsize=11)
    axis.set_xlim(left=0)
    axis.tick_params(labelsize=10)
    axis.grid(alpha=0.3)


def _least(points: Points) -> list[str]:
    """The opponents that lose least, over all lengths and settings."""
    losses: dict[str, list[float]] = defaultdict(list)
    for modes in points.values():
        for mode, found in modes.items():
            if mode not in ("hard", "window", "random", "oracle"):
                losses[mode] += [loss for _, loss in found]
    return sorted((mode for mode in losses if losses[mode]), key=lambda mode: sum(losses[mode]) / len(losses[mode]))[
        :_RIVALS
    ]
