"""lm-evaluation-harness with an adapter loaded: dense against Focus, task by task. Needs ``focus-hf[eval]``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from .modes import Mode, attending


def run_tasks(
    model: nn.Module,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    task_path: Path | None = None,
    limit: int | None = None,
    batch_size: int = 4,
    tick: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Run tasks twice, with dense attention and with Focus, on the same examples.

    Args:
        model, tokenizer: with an active Focus adapter; it keeps its own settings.
        tasks: names, as the harness knows them or as a file (YAML) in the folder ``task_path`` gives them.
        limit: examples of each task, at most; ``batch_size`` requests are made at a time.
        tick: called after each of the two runs.

    Returns:
        A mapping for each task and metric: ``task``, ``metric``, ``dense``, ``focus``, ``stderr`` (of the dense
        figure, ``None`` where the harness gives none), ``examples``.

    Raises:
        ValueError: a task is unknown.
        ModuleNotFoundError: the harness is not installed.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if task_path is None else str(task_path))
    if unknown := [name for name in tasks if not manager.match_tasks([name])]:
        raise ValueError(f"lm-evaluation-harness has no task {unknown[0]!r}; name another, or give --task-path.")
    found = {}
    for mode in (Mode("dense"), Mode("hard")):
        with attending(model, mode):
            found[mode.name] = simple_evaluate(
                model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size),
                tasks=list(tasks),
                limit=limit,
                task_manager=manager,
                bootstrap_iters=1000,
                log_samples=False,
                random_seed=0,
            )
        tick()
    return _rows(found["dense"], found["hard"])


def _on_hub(dataset: Any) -> str | None:
    """A data set's Hub id; file formats and folders are none."""
    is_id = isinstance(dataset, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", dataset) and not Path(dataset).exists()
    return dataset if is_id else None


def _rows(dense: dict[str, Any], focus: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for task, measured in dense["results"].items():
        for key, value in measured.items():
            name, separator, filtered = key.partition(",")  # of metric and filter; other keys are about the task
            if not separator or name.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = measured.get(f"{name}_stderr,{filtered}")
            rows.append(
                {
                    "task": task,
                    "metric": name if filtered in ("", "none") else f"{name} ({filtered})",
                    "dense": float(value),
                    "focus": float(focus["results"][task][key]),
                    "stderr": float(stderr) if isinstance(stderr, int | float) else None,
                    "examples": int(dense["n-samples"][task]["effective"]),
                    "dataset": _on_hub(dense["configs"].get(task, {}).get("dataset_path")),
                }
            )
    return rows
