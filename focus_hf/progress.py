"""How far long work is: bars on a terminal, and plain lines where there is none (a log file, a cluster, CI)."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

#: Seconds of work from which its speed is estimated: one step of a real model can take half a minute.
_SPEED_OVER = 300.0


def progress_display(console: Console) -> Progress:
    """Bars if the console is a terminal that can redraw them, lines if it is not.

    Args:
        console: where to; a quiet one shows nothing.
    """
    if not console.is_interactive:
        return LineProgress(console)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, speed_estimate_period=_SPEED_OVER)


def quiet_libraries() -> None:
    """Turn off libraries' own bars and chatter, which would come between ours."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # Arguments that PEFT and we name as transformers 5.22 does.
    warnings.filterwarnings("ignore", message="`(is_)?gradient_checkpointing", category=FutureWarning)


class LineProgress(Progress):
    """A `rich` display for a place that keeps every line: one whenever a task has something new to say.

    Work that only counts gets a line now and then, and a last one when it stops.

    Args:
        console: where to.
        every: seconds after which a task that has nothing new to say tells how far it is.
    """

    def __init__(self, console: Console, every: float = 30.0) -> None:
        super().__init__(console=console, disable=True, speed_estimate_period=_SPEED_OVER)
        self.every = every
        self._told: dict[TaskID, tuple[str, float, float]] = {}  # description, completed, when

    def add_task(self, description: str, *args: Any, **kwargs: Any) -> TaskID:
        task = super().add_task(description, *args, **kwargs)
        self._told[task] = (description, self._tasks[task].completed, self.get_time())
        return task

    def update(self, task_id: TaskID, *args: Any, **kwargs: Any) -> None:
        super().update(task_id, *args, **kwargs)
        self._tell(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._tell(task_id)

    def stop(self) -> None:
        for task in self.task_ids:
            self._tell(task, last=True)
        super().stop()

    def _tell(self, task_id: TaskID, last: bool = False) -> None:
        task = self._tasks[task_id]
        description, completed, when = self._told[task_id]
        is_new = task.description != description
        is_further = task.completed != completed and (last or self.get_time() - when >= self.every)
        if not task.visible or not (is_new or is_further):
            return
        self._told[task_id] = (task.description, task.completed, self.get_time())
        total = "" if task.total is None else f"/{task.total:,.0f}"
        line = f"{task.description}: {task.completed:,.0f}{total}, {timedelta(seconds=int(task.elapsed or 0))} so far"
        if task.time_remaining is not None and not task.finished:
            line += f", {timedelta(seconds=int(task.time_remaining))} left"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
