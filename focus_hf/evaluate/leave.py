"""What is left beside an adapter that was made: a sample of its groups, its figures, a picture."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from ..records import Results, TokenSample, save_results
from ..records.adapter_files import GROUPS_FILE, weights_hash
from .figures import quality_figure
from .quality import QualityRow

#: Picture of perplexity against pairs, in the folder of pictures.
_QUALITY = "quality.png"


def replace_sample(sample: TokenSample, folder: Path) -> None:
    """Write a sample of tokens with their groups, and remove what was said of the groups before."""
    figures = folder / "figures"
    for stale in (folder / GROUPS_FILE, figures / _QUALITY, *figures.glob("groups-*.png")):
        stale.unlink(missing_ok=True)
    replace(sample, weights_sha256=weights_hash(folder)).save(folder)


def write_records(results: Results, folder: Path) -> None:
    """Write the figures, as far as they are known, and their picture.

    Args:
        results: what was measured; the hash of the weights is filled in.
        folder: of the adapter.
    """
    results.weights_sha256 = weights_hash(folder)
    save_results(results, folder)
    for evaluation in results.evaluations[:1]:
        with contextlib.suppress(ModuleNotFoundError):  # figures without a picture are still figures
            quality_figure([QualityRow(**row) for row in evaluation.rows], folder / "figures" / _QUALITY)
