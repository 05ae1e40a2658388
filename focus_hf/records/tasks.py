"""Rows of tasks where far tokens decide as tables: a line for each task, a column for each mode of attention."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .results import setting

Row = dict[str, Any]


@dataclass(frozen=True)
class TaskTable:
    """What was measured at one length.

    Args:
        length: tokens of each prompt with its answer.
        samples: prompts of each task.
        modes: a row of each mode, for the columns' names.
        lines: what was asked, and what came of it in each mode; empty where it was not measured. The last one says
            which share of the pairs was attended.
    """

    length: int
    samples: int
    modes: list[Row]
    lines: list[tuple[str, list[str]]]


def ruler_tables(rows: Sequence[Row]) -> list[TaskTable]:
    """A table of RULER's tasks (`Results.ruler`) for each length: answers found, and log-probability of the right one
    in nats a token."""

    def asked(row: Row) -> str:
        if not (last := row.get("question_tokens")):
            return str(row["task"])
        share = row["question_pairs"]
        how = "densely" if share == 1 else f"with {100 * share:.0f} % of what is before them"
        return f"{row['task']}, the last {last} tokens and the answer read {how}"

    def cells(row: Row) -> dict[Any, str]:
        return {asked(row): f"{100 * row['score']:.0f} %, {row['logprob']:.2f}"}

    return [_table(here, {name: name for name in map(asked, here)}, cells) for here in _by_prompts(rows)]


def code_tables(rows: Sequence[Row]) -> list[TaskTable]:
    """A table of the tasks on code (`Results.code`) for each length: losses in nats a token."""

    def cells(row: Row) -> dict[Any, str]:
        if row["task"] == "completion":
            return {"completion": f"{row['loss']:.2f}; {100 * row['exact']:.0f} %"}
        return {int(stretch["above"]): f"{stretch['loss']:.2f}" for stretch in row["by_distance"]}

    tables = []
    for here in _by_prompts(rows):
        edges = sorted({int(stretch["above"]) for row in here for stretch in row["by_distance"]})
        asked: dict[Any, str] = {}
        for edge, after in zip(edges, [*edges[1:], None], strict=True):
            far = f"more than {edge:,}" if after is None else f"{edge + 1:,} to {after:,}"
            asked[edge] = f"second use of a name, {far} tokens after the first"
        for row in here:
            if row["task"] == "completion":
                asked["completion"] = f"rest of a line that stands {row['distance']:,} tokens back; told exactly"
        tables.append(_table(here, asked, cells))
    return tables


def _by_prompts(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that were measured on prompts of one length and number, the shortest first."""
    kinds = sorted({(row["length"], row["samples"]) for row in rows})
    return [[row for row in rows if (row["length"], row["samples"]) == kind] for kind in kinds]


def _table(rows: list[Row], asked: dict[Any, str], cells: Callable[[Row], dict[Any, str]]) -> TaskTable:
    modes: dict[tuple[object, ...], Row] = {}
    found: dict[tuple[object, ...], dict[Any, str]] = defaultdict(dict)
    for row in rows:
        mode = row["mode"], *setting(row)
        modes.setdefault(mode, row)
        found[mode] |= cells(row)
    lines = [(name, [found[mode].get(place, "") for mode in modes]) for place, name in asked.items()]
    pairs = [f"{100 * row['pairs']:.0f} %" for row in modes.values()]
    return TaskTable(rows[0]["length"], rows[0]["samples"], list(modes.values()), [*lines, ("pairs attended", pairs)])
