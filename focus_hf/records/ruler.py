"""RULER's rows as tables: a line for each task, a column for each mode of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .results import setting


@dataclass(frozen=True)
class RulerTable:
    """What was measured at one length.

    Args:
        length: tokens of each prompt with its answer.
        samples: prompts of each task.
        modes: a row of each mode, for the columns' names.
        tasks: for each task its name and its row in each mode, ``None`` where it was not measured.
    """

    length: int
    samples: int
    modes: list[dict[str, Any]]
    tasks: list[tuple[str, list[dict[str, Any] | None]]]


def ruler_tables(rows: Sequence[dict[str, Any]]) -> list[RulerTable]:
    """A table for each length, the shortest first.

    Args:
        rows: as `focus_hf.records.Results.ruler`.
    """
    tables = []
    for length in sorted({row["length"] for row in rows}):
        here = [row for row in rows if row["length"] == length]
        modes = {_mode(row): row for row in reversed(here)}
        columns = [modes[key] for key in dict.fromkeys(map(_mode, here))]
        found = {(row["task"], _mode(row)): row for row in here}
        tasks = [
            (task, [found.get((task, _mode(column))) for column in columns])
            for task in dict.fromkeys(row["task"] for row in here)
        ]
        tables.append(RulerTable(length, here[0]["samples"], columns, tasks))
    return tables


def _mode(row: dict[str, Any]) -> tuple[object, ...]:
    return row["mode"], *setting(row)
