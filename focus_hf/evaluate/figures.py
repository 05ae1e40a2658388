"""Pictures of an evaluation, readable in light and dark and without colour. Needs the extra ``focus-hf[viz]``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from ..files import save_figure
from .modes import Mode
from .quality import QualityRow

#: Shape and colour of each mode (Okabe and Ito's colours, which colour-blind eyes tell apart).
_STYLES = {
    "dense": ("s", "#000000"),
    "local": ("^", "#D55E00"),
    "soft": ("D", "#009E73"),
    "hard": ("o", "#0072B2"),
    "window": ("v", "#E69F00"),
    "random": ("x", "#CC79A7"),
    "quest": ("P", "#56B4E9"),
    "blocks": ("s", "#56B4E9"),
    "slash": ("X", "#E69F00"),
    "clusters": ("p", "#CC79A7"),
    "clusters-estimate": ("h", "#CC79A7"),
    "streaming": ("<", "#D55E00"),
    "oracle": ("*", "#009E73"),
}
_DASHES = ("-", "--", "-.", ":")


def quality_figure(rows: Sequence[QualityRow], path: str | os.PathLike[str]) -> Path:
    """Perplexity against pairs attended, one labelled point a row (see `quality_table`), written as a PNG to a path
    whose folder is created; gives the path.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    axes = _axes()
    hard = [row for row in rows if row.mode == "hard"]
    for row in rows:
        marker, colour = _STYLES[row.mode.removesuffix("-gqa")]
        below = row in hard and hard.index(row) % 2 == 0  # or neighbours would overlap
        label = str(row) if row.mode == "hard" else row.mode
        label += f" {row.width}" if row.mode == "window" else ""
        axes.plot(100 * row.pairs, row.perplexity, marker, color=colour, markersize=9)
        at_the_right = row.pairs > 0.7
        axes.annotate(
            f"{label}  {row.perplexity:.2f}",
            (100 * row.pairs, row.perplexity),
            textcoords="offset points",
            xytext=(-9 if at_the_right else 9, -16 if below else 8),
            ha="right" if at_the_right else "left",
        )
    axes.set(xlabel="pairs attended in routed layers (%)", ylabel="perplexity", xlim=(0, 105))
    axes.margins(y=0.2)
    return _save(axes, "Quality against pairs computed", path)


def position_figure(rows: Iterable[QualityRow], path: str | os.PathLike[str]) -> Path:
    """Loss above dense by position in the window: where attention that is left out is missed. See `quality_figure`.

    Raises:
        ValueError: there is no dense row to compare with.
        ModuleNotFoundError: matplotlib is not installed.
    """
    rows = list(rows)
    dense = next((row for row in rows if row.mode == "dense"), None)
    if dense is None:
        raise ValueError("A curve over positions compares with dense attention: measure the mode 'dense' too.")
    axes = _axes()
    for place, row in enumerate(row for row in rows if row.mode != "dense"):
        middle = [(bucket["first"] + bucket["last"]) / 2 for bucket in row.positions]
        above = [ours["loss"] - theirs["loss"] for ours, theirs in zip(row.positions, dense.positions, strict=True)]
        _line(axes, place, row.mode, middle, above, str(row))
    axes.axhline(0, color="black", linewidth=1)
    axes.set(xlabel="position in the window (tokens)", ylabel="loss above dense (nats per token)")
    axes.legend(fontsize="small")
    return _save(axes, "Where long-range attention matters", path)


def retrieval_figure(rows: Sequence[dict[str, Any]], path: str | os.PathLike[str]) -> Path:
    """Information retrieved from far back against length, by mode, of `Results.retrieval`. See `quality_figure`."""
    axes = _axes()
    _by_length(axes, rows, "gain")
    axes.axhline(0, color="black", linewidth=1)
    axes.set(ylabel="gain from the needle (nats per token)")
    return _save(axes, "Retrieval from far back", path)


def ruler_figure(rows: Sequence[dict[str, Any]], path: str | os.PathLike[str]) -> Path:
    """RULER's score, a mean over its tasks, against length, by mode, of `Results.ruler`. See `quality_figure`."""
    axes = _axes()
    _by_length(axes, [{**row, "answered": 100 * row["score"]} for row in rows], "answered")
    axes.set(ylabel="answered (%)", ylim=(-3, 103))
    return _save(axes, f"RULER, mean of {len({row['task'] for row in rows})} tasks", path)


def _by_length(axes: Any, rows: Sequence[dict[str, Any]], value: str) -> None:
    """A line for each mode: the mean of its rows at each length, whatever width a window has there."""
    lines: dict[Mode, dict[int, list[float]]] = {}
    for row in rows:
        lines.setdefault(replace(Mode.of(row), width=None), {}).setdefault(row["length"], []).append(row[value])
    for place, (mode, found) in enumerate(lines.items()):
        lengths = sorted(found)
        _line(axes, place, mode.name, lengths, [fmean(found[length]) for length in lengths], str(mode))
    axes.set(xlabel="tokens")
    axes.legend(fontsize="small")


def _line(axes: Any, place: int, mode: str, x: Sequence[float], y: Sequence[float], label: str) -> None:
    marker, colour = _STYLES[mode.removesuffix("-gqa")]
    axes.plot(x, y, _DASHES[place % len(_DASHES)], marker=marker, color=colour, label=label, markersize=5)


def _axes() -> Any:
    from matplotlib.figure import Figure

    axes = Figure(figsize=(6.4, 4.0), dpi=150).subplots()
    axes.grid(alpha=0.3)
    return axes


def _save(axes: Any, title: str, path: str | os.PathLike[str]) -> Path:
    axes.set_title(title)
    axes.figure.tight_layout()
    return save_figure(axes.figure, Path(path))
