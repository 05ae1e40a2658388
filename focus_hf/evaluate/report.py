"""Results for people: tables on the screen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from ..records import Evaluation, Results, code_tables, ruler_tables
from ..records.results import to_dense
from .modes import Mode


def tables(results: Results) -> Iterator[Table]:
    """A rich table for each evaluation, the retrieval probe, each length of RULER and of code, and benchmarks."""
    for evaluation in results.evaluations:
        yield _quality(evaluation)
    if rows := results.retrieval:
        cells = [(_mode(r), f"{r['length']:,}", f"{r['gain']:.2f}", f"{100 * r['exact']:.0f} %") for r in rows]
        yield _table("Retrieval from far back", ("attention", "tokens", "gain (nats)", "exact"), cells)
    answered = "RULER, answered and log-probability of the right answer (nats per token)"
    measured = [(answered, table) for table in ruler_tables(results.ruler)]
    measured += [("Code, loss (nats per token)", table) for table in code_tables(results.code)]
    for title, table in measured:
        head = f"{title}, {table.length:,} tokens, {table.samples} prompts of each task"
        yield _table(head, ("task", *map(_mode, table.modes)), [(name, *cells) for name, cells in table.lines])
    if results.benchmarks:
        figures = [(row, row["dense"], row["focus"]) for row in results.benchmarks]
        lines = [(r["task"], r["metric"], f"{a:.4f}", f"{b:.4f}", f"{b - a:+.4f}") for r, a, b in figures]
        yield _table("Benchmarks", ("task", "metric", "dense", "Focus", "difference"), lines)


def _quality(evaluation: Evaluation) -> Table:
    rows, dense = evaluation.rows, evaluation.perplexity("dense")
    columns = {
        "attention": list(map(_mode, rows)),
        "perplexity": [f"{row['perplexity']:.2f}" for row in rows],
        "to dense": ["" if dense is None else to_dense(row, dense) for row in rows],
        "divergence": [_shown(row.get("divergence"), ".4f") for row in rows],
        "pairs attended": [_shown(row["pairs"], ".0%") for row in rows],
    }
    if any(row.get("loaded") not in (None, row["pairs"]) for row in rows):
        columns["keys loaded"] = [_shown(row.get("loaded"), ".0%") for row in rows]
    if any(row.get("scoring") for row in rows):
        columns["choosing"] = [_choosing(row.get("scoring")) for row in rows]
    columns |= {name: [_shown(row.get(name), ".3f") for row in rows] for name in ("copies", "rest")}
    title = f"Perplexity on {evaluation.data}, {evaluation.context_length} tokens"
    table = _table(title, columns, zip(*columns.values(), strict=True))
    if evaluation.copies:
        table.caption = (
            f"copies: loss in nats on the {evaluation.copies:,} tokens that were seen before, out of the window only; "
            "rest: on all others"
        )
        table.caption_justify = "left"
    return table


def _shown(figure: float | None, form: str) -> str:
    return "" if figure is None else format(figure, form).replace("%", " %")


def _choosing(scoring: dict[str, float] | None) -> str:
    """What choosing costs beside the pairs, in products of a prompt and in bytes of a new token, in pairs' worth."""
    if not scoring or not any(scoring.values()):
        return ""
    return f"+{100 * scoring['products']:.1f} / {100 * scoring['bytes']:.1f} %"


def _mode(row: dict[str, Any]) -> str:
    return str(Mode.of(row))


def _table(title: str, columns: Iterable[str], lines: Iterable[Iterable[str]]) -> Table:
    table = Table(title=Text(title), title_justify="left", min_width=60)  # as Text, so that brackets are no markup
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right")
    for cells in lines:
        table.add_row(*cells)
    return table
