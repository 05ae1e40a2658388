"""Pictures of an evaluation, readable in light and dark and without colour. Needs the extra ``focus-hf[viz]``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from .perplexity import QualityRow


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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), dpi=150)
    markers = {"dense": "s", "local": "^", "hard": "o"}
    for row in rows:
        label = f"Focus, top_k={row.top_k}" if row.mode == "hard" else row.mode
        axes.plot(100 * row.pairs, row.perplexity, markers[row.mode], color="#0072B2", markersize=9)
        at_the_right = row.pairs > 0.7
        axes.annotate(
            f"{label}  {row.perplexity:.2f}",
            (100 * row.pairs, row.perplexity),
            textcoords="offset points",
            xytext=(-9 if at_the_right else 9, -16 if row.mode == "hard" else 8),  # or neighbours would overlap
            ha="right" if at_the_right else "left",
        )
    axes.set_xlabel("pairs attended in routed layers (%)")
    axes.set_ylabel("perplexity")
    axes.set_xlim(0, 105)
    axes.margins(y=0.2)
    axes.grid(alpha=0.3)
    axes.set_title("Quality against pairs computed")
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(target, facecolor="white", metadata={"Software": None})
    pyplot.close(figure)
    return target
