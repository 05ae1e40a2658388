"""Results for people: tables on the screen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from ..records import Evaluation, Results
from .modes import Mode


def tables(results: Results) -> Iterator[Table]:
    """A rich table for each evaluation, one for the retrieval probe, one for benchmarks."""
    for evaluation in results.evaluations:
        yield _quality(evaluation)
    if results.retrieval:
        yield _retrieval(results.retrieval)
    if results.benchmarks:
        yield _benchmarks(results.benchmarks)


def _quality(evaluation: Evaluation) -> Table:
    title = f"Perplexity on {evaluation.data}, {evaluation.context_length} tokens"
    table = _table(title, "attention", "perplexity", "to dense", "pairs attended", "largest group")
    dense = evaluation.perplexity("dense")
    for row in evaluation.rows:
        change = "" if dense is None else f"{100 * (row['perplexity'] / dense - 1):+.2f} %"
        largest = row.get("largest_group")
        shown = "" if largest is None else f"{100 * largest:.1f} %"
        table.add_row(_name(row), f"{row['perplexity']:.2f}", change, f"{100 * row['pairs']:.0f} %", shown)
    return table


def _retrieval(rows: list[dict[str, Any]]) -> Table:
    table = _table("Retrieval from far back", "attention", "tokens", "gain (nats)", "exact")
    for row in rows:
        table.add_row(_name(row), f"{row['length']:,}", f"{row['gain']:.2f}", f"{100 * row['exact']:.0f} %")
    return table


def _benchmarks(rows: list[dict[str, Any]]) -> Table:
    table = _table("Benchmarks", "task", "metric", "dense", "Focus", "difference")
    for row in rows:
        change = f"{row['focus'] - row['dense']:+.4f}"
        table.add_row(row["task"], row["metric"], f"{row['dense']:.4f}", f"{row['focus']:.4f}", change)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=Text(title), title_justify="left", min_width=60)  # as Text, so that brackets are no markup
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right")
    return table


def _name(row: dict[str, Any]) -> str:
    return str(Mode(row["mode"], row.get("top_k")))
