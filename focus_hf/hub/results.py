"""``focus_results.json``: the figures a card shows, in the same repository, so that text and data cannot disagree."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .adapter_files import RESULTS_FILE, AdapterFileError, write_atomically

SCHEMA = 1


@dataclass
class Results:
    """Measured quality of an adapter.

    Args:
        data: what it was measured on, in words.
        context_length: tokens per window.
        rows: one mapping a line: ``mode`` (dense, local, hard), ``top_k``, ``perplexity``, ``pairs`` (share of
            possible pairs that routed layers attend to).
        largest_group: share of tokens held by the largest group of any layer, after calibration.
        measured_with: versions, machine and date.
        training: hyper-parameters of the training run.
        schema: version of this file's format.

    Raises:
        ValueError: a figure is not finite.
    """

    data: str
    context_length: int
    rows: list[dict[str, Any]]
    largest_group: float | None = None
    measured_with: dict[str, str] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        for row in self.rows:
            for name in ("perplexity", "pairs"):
                if not math.isfinite(row[name]):
                    raise ValueError(f"Results: {name} of mode {row['mode']} is {row[name]}; measure it again.")


def save_results(results: Results, folder: str | os.PathLike[str]) -> None:
    """Write ``focus_results.json`` into an adapter's folder."""
    text = json.dumps(asdict(results), indent=2, allow_nan=False)
    write_atomically(Path(folder) / RESULTS_FILE, text.encode())


def load_results(folder: str | os.PathLike[str]) -> Results | None:
    """Read ``focus_results.json``, ``None`` if there is none.

    Raises:
        AdapterFileError: it cannot be read.
    """
    path = Path(folder) / RESULTS_FILE
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.get("schema", 0) > SCHEMA:
            raise AdapterFileError(f"{path} has schema {values['schema']}; upgrade: pip install -U focus-hf")
        return Results(**values)
    except AdapterFileError:
        raise
    except (TypeError, KeyError, ValueError) as error:
        raise AdapterFileError(f"{path} cannot be read ({error}); measure the adapter again.") from None
