"""Results for people: tables on the screen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from ..records import Evaluation, Results, TaskTable, code_tables, ruler_tables
from ..records.results import to_dense
from .modes import Mode


def tables(results: Results) -> Iterator[Table]:
    """A rich table for each evaluation, the retrieval probe, each length of RULER and of code, and benchmarks."""
    for evaluation in results.evaluations:
        yield _quality(evaluation)
    if results.retrieval:
        yield _retrieval(results.retrieval)
    answered = "RULER, answered and log-probability of the right answer (nats per token)"
    yield from (_tasks(answered, table) for table in ruler_tables(results.ruler))
    yield from (_tasks("Code, loss (nats per token)", table) for table in code_tables(results.code))
    if results.benchmarks:
        yield _benchmarks(results.benchmarks)


def _quality(evaluation: Evaluation) -> Table:
    title = f"Perplexity on {evaluation.data}, {evaluation.context_length} tokens"
    columns = ["attention", "perplexity", "to dense", "divergence", "pairs attended"]
    opposed = any(row.get("scoring") for row in evaluation.rows)
    loads = any(row.get("loaded") not in (None, row["pairs"]) for row in evaluation.rows)
    columns += ["keys loaded"] * loads + ["choosing"] * opposed + ["copies", "rest"]
    table = _table(title, *columns)
    dense = evaluation.perplexity("dense")
    for row in evaluation.rows:
        change = "" if dense is None else to_dense(row, dense)
        losses = ["" if (loss := row.get(name)) is None else f"{loss:.3f}" for name in ("copies", "rest")]
        loaded = "" if row.get("loaded") is None else f"{100 * row['loaded']:.0f} %"
        cost = [loaded] * loads + [_choosing(row.get("scoring"))] * opposed
        pairs = f"{100 * row['pairs']:.0f} %"
        far = "" if row.get("divergence") is None else f"{row['divergence']:.4f}"
        table.add_row(str(Mode.of(row)), f"{row['perplexity']:.2f}", change, far, pairs, *cost, *losses)
    if evaluation.copies:
        table.caption = (
            f"copies: loss in nats on the {evaluation.copies:,} tokens that were seen before, out of the window only; "
            "rest: on all others"
        )
        table.caption_justify = "left"
    return table


def _choosing(scoring: dict[str, float] | None) -> str:
    """What choosing costs beside the pairs, in products of a prompt and in bytes of a new token, in pairs' worth."""
    if not scoring or not any(scoring.values()):
        return ""
    return f"+{100 * scoring['products']:.1f} / {100 * scoring['bytes']:.1f} %"


def _retrieval(rows: list[dict[str, Any]]) -> Table:
    table = _table("Retrieval from far back", "attention", "tokens", "gain (nats)", "exact")
    for row in rows:
        table.add_row(str(Mode.of(row)), f"{row['length']:,}", f"{row['gain']:.2f}", f"{100 * row['exact']:.0f} %")
    return table


def _tasks(title: str, measured: TaskTable) -> Table:
    head = f"{title}, {measured.length:,} tokens, {measured.samples} prompts of each task"
    table = _table(head, "task", *(str(Mode.of(mode)) for mode in measured.modes))
    for name, cells in measured.lines:
        table.add_row(name, *cells)
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
