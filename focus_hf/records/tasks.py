"""Rows of tasks where far tokens decide as tables: a line for each task, a column for each mode of attention."""

from __future__ import annotations

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
    """A table of RULER's tasks for each length: answers found, and log-probability of the right one, nats a token.

    Args:
        rows: as `focus_hf.records.Results.ruler`.
    """
    return [_table(here, {row["task"]: row["task"] for row in here}, _said) for here in _by_prompts(rows)]


def code_tables(rows: Sequence[Row]) -> list[TaskTable]:
    """A table of the tasks on code for each length: losses in nats a token.

    Args:
        rows: as `focus_hf.records.Results.code`.
    """
    tables = []
    for here in _by_prompts(rows):
        edges = sorted({int(stretch["above"]) for row in here for stretch in row["by_distance"]})
        asked: dict[Any, str] = {
            edge: f"second use of a name, {_stretch(edge, after)} tokens after the first"
            for edge, after in zip(edges, [*edges[1:], None], strict=True)
        }
        for row in here:
            if row["task"] == "completion":
                asked["completion"] = f"rest of a line that stands {row['distance']:,} tokens back; told exactly"
        tables.append(_table(here, asked, _losses))
    return tables


def _stretch(above: int, up_to: int | None) -> str:
    return f"more than {above:,}" if up_to is None else f"{above + 1:,} to {up_to:,}"


def _by_prompts(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that were measured on prompts of one length and number, the shortest first."""
    kinds = sorted({(row["length"], row["samples"]) for row in rows})
    return [[row for row in rows if (row["length"], row["samples"]) == kind] for kind in kinds]


def _said(row: Row) -> dict[Any, str]:
    return {row["task"]: f"{100 * row['score']:.0f} %, {row['logprob']:.2f}"}


def _losses(row: Row) -> dict[Any, str]:
    if row["task"] == "completion":
        return {"completion": f"{row['loss']:.2f}; {100 * row['exact']:.0f} %"}
    return {int(stretch["above"]): f"{stretch['loss']:.2f}" for stretch in row["by_distance"]}


def _table(rows: list[Row], asked: dict[Any, str], cells: Callable[[Row], dict[Any, str]]) -> TaskTable:
    modes = {_mode(row): row for row in reversed(rows)}
    columns = list(dict.fromkeys(map(_mode, rows)))
    found = {(_mode(row), place): cell for row in rows for place, cell in cells(row).items()}
    lines = [(name, [found.get((mode, place), "") for mode in columns]) for place, name in asked.items()]
    pairs = [f"{100 * modes[mode]['pairs']:.0f} %" for mode in columns]
    named = [modes[mode] for mode in columns]
    return TaskTable(rows[0]["length"], rows[0]["samples"], named, [*lines, ("pairs attended", pairs)])


def _mode(row: Row) -> tuple[object, ...]:
    return row["mode"], *setting(row)
