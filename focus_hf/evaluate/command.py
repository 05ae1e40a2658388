"""`focus-hf eval`: an adapter and texts in; tables, JSON, pictures and the adapter's own results out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress, TaskID

from ..machine import measured_with, require
from ..output import deliver
from ..records import Results, check_writable, load_results, save_results
from ..records.adapter_files import weights_hash
from ..texts import TextSource, first_tokens
from .checks import check_positions
from .code_tasks.run import TASKS, CodePlan, measure_code
from .figures import position_figure, quality_figure, retrieval_figure, ruler_figure
from .harness import run_tasks
from .leave import take_sample
from .modes import Row, with_cache
from .quality import QualityRow
from .report import tables
from .ruler.run import RulerPlan, measure_ruler
from .run import EvaluationPlan, Load, TokenText, count_ticks, evaluate, modes_of


def run_evaluation(
    adapter: str,
    sources: Sequence[TextSource],
    plan: EvaluationPlan,
    *,
    load: Load,
    progress: Progress,
    ruler: RulerPlan | None = None,
    code: CodePlan | None = None,
    tasks: Sequence[str] = (),
    task_path: Path | None = None,
    limit: int | None = None,
    json_out: str | None = None,
    plots: Path | None = None,
    write: bool = False,
) -> Results:
    """Measure an adapter and deliver what was asked for; gives what was measured.

    Args:
        adapter: folder or Hub id.
        sources: texts, as for `evaluate`; none if only RULER, tasks on code or of the harness are run.
        plan: what to measure on them.
        load: gives model, tokenizer and folder of the adapter, see `focus_hf.hub.load_adapted`; called when all else
            was found in order.
        progress: shows how far it is.
        ruler, code: RULER's tasks and tasks on code to measure, in the modes of the plan.
        tasks, task_path, limit: of lm-evaluation-harness, see `run_tasks`.
        json_out: file for JSON, or ``"-"`` for standard output, where then nothing else goes.
        plots: folder for pictures.
        write: put the figures into the adapter's folder; the card shows them from then on.

    Raises:
        ValueError: nothing to measure, or bad input.
    """
    texts = [source.load() for source in sources]
    if not texts and ruler is None and code is None and not tasks:
        raise ValueError("Nothing to measure: give --text, --dataset, --ruler, --code or --tasks.")
    require(*(["matplotlib"] if plots is not None else []), *(["lm_eval"] if tasks else []))
    if write:
        check_writable(adapter)
    model, tokenizer, folder = load(adapter)
    results = Results(measured_with=measured_with())
    if texts:
        bar = progress.add_task("evaluation", total=count_ticks(model, len(texts), plan))
        first = first_tokens(tokenizer)
        given = [TokenText.of(text, text.token_ids(tokenizer), first) for text in texts]
        results = evaluate(model, given, plan, lambda done: progress.update(bar, advance=1, description=done))
    if ruler is not None:
        check_positions(model, ruler.lengths)
        modes = with_cache(modes_of(model, plan))
        bar = progress.add_task("RULER", total=len(modes) * len(ruler.tasks) * len(ruler.lengths))
        results.ruler = _follow(measure_ruler(model, tokenizer, ruler, modes), progress, bar)
    if code is not None:
        check_positions(model, code.lengths)
        modes = modes_of(model, plan)
        bar = progress.add_task("code", total=len(modes) * len(TASKS) * len(code.lengths))
        results.code = _follow(measure_code(model, tokenizer, code, modes), progress, bar)
    if tasks:
        bar = progress.add_task(f"tasks: {', '.join(tasks)}", total=2)
        tick = partial(progress.advance, bar)
        results.benchmarks = run_tasks(
            model, tokenizer, tasks, task_path=task_path, limit=limit, batch_size=plan.batch_size, tick=tick
        )
    progress.stop()
    deliver(json.dumps(asdict(results), indent=2, allow_nan=False) + "\n", json_out, tables(results))
    if plots is not None:
        save_plots(results, plots)
    if write:
        add_to_adapter(results, folder)
        if texts:
            begun = torch.cat([given[0].ids.new_tensor(first), given[0].ids])
            take_sample(model, begun, weights_hash(folder)).save(folder)
    return results


def _follow(measured: Iterable[Row], progress: Progress, bar: TaskID) -> list[dict[str, Any]]:
    """Rows one by one as they are measured, with a bar that says which was the last."""
    rows = []
    for row in measured:
        rows.append(row.to_dict())
        progress.update(bar, advance=1, description=str(row))
    return rows


def save_plots(results: Results, folder: Path) -> None:
    """Pictures of the first evaluation, of the retrieval probe and of RULER."""
    for evaluation in results.evaluations[:1]:
        rows = [QualityRow(**row) for row in evaluation.rows]
        quality_figure(rows, folder / "quality.png")
        if any(row.mode == "dense" for row in rows):
            position_figure(rows, folder / "positions.png")
    if results.retrieval:
        retrieval_figure(results.retrieval, folder / "retrieval.png")
    if results.ruler:
        ruler_figure(results.ruler, folder / "ruler.png")


def add_to_adapter(results: Results, folder: Path) -> None:
    """Merge what was measured into an adapter's ``focus_results.json``."""
    known = load_results(folder) or Results()
    results.weights_sha256 = weights_hash(folder)
    known.add(results)
    save_results(known, folder)
