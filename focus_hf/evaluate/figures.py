"""Pictures of an evaluation, readable in light and dark and without colour. Needs the extra ``focus-hf[viz]``."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..files import write_atomically
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
    """Perplexity against pairs attended, one labelled point a row, written as a PNG.

    Args:
        rows: from `quality_table`.
        path: file to write; its folder is created.

    Returns:
        The path.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure, axes = _axes()
    hard = [row for row in rows if row.mode == "hard"]
    for row in rows:
        marker, colour = _STYLES[row.mode]
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
    axes.set_title("Quality against pairs computed")
    return _save(figure, path)


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
    figure, axes = _axes()
    for place, row in enumerate(row for row in rows if row.mode != "dense"):
        marker, colour = _STYLES[row.mode]
        middle = [(bucket["first"] + bucket["last"]) / 2 for bucket in row.positions]
        above = [ours["loss"] - theirs["loss"] for ours, theirs in zip(row.positions, dense.positions, strict=True)]
        dashes = _DASHES[place % len(_DASHES)]
        axes.plot(middle, above, dashes, marker=marker, color=colour, label=str(row), markersize=5)
    axes.axhline(0, color="black", linewidth=1)
    axes.set(xlabel="position in the window (tokens)", ylabel="loss above dense (nats per token)")
    axes.legend(fontsize="small")
    axes.set_title("Where long-range attention matters")
    return _save(figure, path)


def retrieval_figure(rows: Sequence[dict[str, Any]], path: str | os.PathLike[str]) -> Path:
    """Information retrieved from far back against length, one line for each mode. See `quality_figure`.

    Args:
        rows: as `focus_hf.records.Results.retrieval`.
        path: file to write.
    """
    figure, axes = _axes()
    modes = dict.fromkeys(map(_without_width, rows))
    for place, mode in enumerate(modes):
        points = [row for row in rows if _without_width(row) == mode]
        marker, colour = _STYLES[mode.name]
        axes.plot(
            [row["length"] for row in points],
            [row["gain"] for row in points],
            _DASHES[place % len(_DASHES)],
            marker=marker,
            color=colour,
            label=str(mode),
        )
    axes.axhline(0, color="black", linewidth=1)
    axes.set(xlabel="tokens", ylabel="gain from the needle (nats per token)")
    axes.legend(fontsize="small")
    axes.set_title("Retrieval from far back")
    return _save(figure, path)


def _without_width(row: dict[str, Any]) -> Mode:
    """What makes one line: a window's width differs with the length."""
    return replace(Mode.of(row), width=None)


def ruler_figure(rows: Sequence[dict[str, Any]], path: str | os.PathLike[str]) -> Path:
    """RULER's score, a mean over its tasks, against length, one line for each mode. See `quality_figure`.

    Args:
        rows: as `focus_hf.records.Results.ruler`.
        path: file to write.
    """
    figure, axes = _axes()
    for place, mode in enumerate(dict.fromkeys(map(_without_width, rows))):
        mine = [row for row in rows if _without_width(row) == mode]
        lengths = sorted({row["length"] for row in mine})
        scores = [[row["score"] for row in mine if row["length"] == length] for length in lengths]
        marker, colour = _STYLES[mode.name]
        axes.plot(
            lengths,
            [100 * sum(here) / len(here) for here in scores],
            _DASHES[place % len(_DASHES)],
            marker=marker,
            color=colour,
            label=str(mode),
        )
    axes.set(xlabel="tokens", ylabel="answered (%)", ylim=(-3, 103))
    axes.legend(fontsize="small")
    axes.set_title(f"RULER, mean of {len({row['task'] for row in rows})} tasks")
    return _save(figure, path)


def _axes() -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), dpi=150)
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure: Any, path: str | os.PathLike[str]) -> Path:
    """A white ground keeps a picture readable on a dark page."""
    from matplotlib import pyplot

    content = io.BytesIO()
    figure.tight_layout()
    figure.savefig(content, format="png", facecolor="white", metadata={"Software": None})
    pyplot.close(figure)
    write_atomically(Path(path), content.getvalue())
    return Path(path)
