"""Results for people: tables on the screen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from ..records import Evaluation, Results, RulerTable, ruler_tables
from ..records.results import to_dense
from .modes import Mode


def tables(results: Results) -> Iterator[Table]:
    """A rich table for each evaluation, the retrieval probe, each length of RULER and of code, and benchmarks."""
    for evaluation in results.evaluations:
        yield _quality(evaluation)
    if results.retrieval:
        yield _retrieval(results.retrieval)
    yield from map(_ruler, ruler_tables(results.ruler))
    for length in sorted({row["length"] for row in results.code}):
        yield _code([row for row in results.code if row["length"] == length])
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
        table.add_row(_name(row), f"{row['perplexity']:.2f}", change, far, pairs, *cost, *losses)
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
        table.add_row(_name(row), f"{row['length']:,}", f"{row['gain']:.2f}", f"{100 * row['exact']:.0f} %")
    return table


def _ruler(measured: RulerTable) -> Table:
    title = (
        f"RULER, {measured.length:,} tokens, {measured.samples} prompts of each task: answered, and log-probability "
        "of the right answer in nats per token"
    )
    table = _table(title, "task", *map(_name, measured.modes))
    for task, rows in measured.tasks:
        table.add_row(
            task, *("" if row is None else f"{100 * row['score']:.0f} %  {row['logprob']:.2f}" for row in rows)
        )
    return table


def _code(rows: list[dict[str, Any]]) -> Table:
    """Of one length: a line for each mode."""
    names, completion = ([row for row in rows if row["task"] == task] for task in ("names", "completion"))
    edges = sorted({stretch["above"] for row in names for stretch in row["by_distance"]})
    title = (
        f"Code, {rows[0]['length']:,} tokens, {rows[0]['samples']} prompts: loss in nats on second uses of names by "
        f"the distance to the first; completion of a line from {completion[0]['distance']:,} tokens back"
    )
    table = _table(title, "attention", *(f"above {edge:,}" for edge in edges), "completion", "exact")
    for named, completed in zip(names, completion, strict=True):
        losses = {stretch["above"]: f"{stretch['loss']:.2f}" for stretch in named["by_distance"]}
        cells = [losses.get(edge, "") for edge in edges]
        table.add_row(_name(named), *cells, f"{completed['loss']:.2f}", f"{100 * completed['exact']:.0f} %")
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
    return str(Mode.of(row))
