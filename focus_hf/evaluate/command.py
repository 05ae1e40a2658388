"""`focus-hf eval`: an adapter and texts in; tables, JSON, pictures and the adapter's own results out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from ..machine import measured_with, require
from ..output import deliver
from ..records import Results, check_writable, load_results, save_results
from ..records.adapter_files import weights_hash
from ..texts import Texts, TextSource
from .code_tasks import TASKS, CodePlan, measure_code
from .figures import position_figure, quality_figure, retrieval_figure, ruler_figure
from .harness import run_tasks
from .quality import QualityRow
from .report import tables
from .ruler import RulerPlan, measure_ruler, ruler_modes
from .run import EvaluationPlan, Load, TokenText, check_positions, count_ticks, evaluate, modes_of
from .sample import take_sample


@dataclass(frozen=True)
class Sources:
    """Texts of an evaluation.

    Args:
        domain: files of the domain.
        retention: files of another domain.
        dataset, subset, split, column: a data set of the domain instead of files.
    """

    domain: tuple[str, ...] = ()
    retention: tuple[str, ...] = ()
    dataset: str | None = None
    subset: str | None = None
    split: str = "test"
    column: str = "text"

    def load(self) -> list[Texts]:
        """The domain's text, then each text of other domains."""
        loaded = []
        if self.domain or self.dataset:
            loaded.append(TextSource(self.domain, self.dataset, self.subset, self.split, None, self.column).load())
        return loaded + [TextSource((name,), column=self.column).load() for name in self.retention]


def run_evaluation(
    adapter: str,
    sources: Sources,
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
    """Measure an adapter and deliver what was asked for.

    Args:
        adapter: folder or Hub id.
        sources: texts; none if only RULER, tasks on code or of the harness are run.
        plan: what to measure on them.
        load: gives model, tokenizer and folder of the adapter, see `focus_hf.hub.load_adapted`; called when all else
            was found in order.
        progress: shows how far it is.
        ruler: RULER's tasks to measure, in the modes of the plan.
        code: tasks on code to measure, in the modes of the plan.
        tasks, task_path, limit: of lm-evaluation-harness, see `run_tasks`.
        json_out: file for JSON, or ``"-"`` for standard output, where then nothing else goes.
        plots: folder for pictures.
        write: put the figures into the adapter's folder; the card shows them from then on.

    Returns:
        What was measured.

    Raises:
        ValueError: nothing to measure, or bad input.
    """
    texts = sources.load()
    if not texts and ruler is None and code is None and not tasks:
        raise ValueError("Nothing to measure: give --text, --dataset, --ruler, --code or --tasks.")
    require(*(["matplotlib"] if plots is not None else []), *(["lm_eval"] if tasks else []))
    if write:
        check_writable(adapter)
    model, tokenizer, folder = load(adapter)
    results = Results(measured_with=measured_with())
    if texts:
        bar = progress.add_task("evaluation", total=count_ticks(model, len(texts), plan))
        results = evaluate(
            model,
            [_tokens(text, tokenizer) for text in texts],
            plan,
            tick=lambda done: progress.update(bar, advance=1, description=done),
        )
    if ruler is not None:
        results.ruler = _ruler(model, tokenizer, ruler, plan, progress)
    if code is not None:
        results.code = _code(model, tokenizer, code, plan, progress)
    if tasks:
        bar = progress.add_task(f"tasks: {', '.join(tasks)}", total=2)
        results.benchmarks = run_tasks(
            model,
            tokenizer,
            tasks,
            task_path=task_path,
            limit=limit,
            batch_size=plan.batch_size,
            tick=lambda: progress.advance(bar),
        )
    progress.stop()
    document = json.dumps(asdict(results), indent=2, allow_nan=False) + "\n"
    deliver(document, json_out, tables(results))
    if plots is not None:
        save_plots(results, plots)
    if write:
        add_to_adapter(results, folder)
        if texts:
            take_sample(model, texts[0].token_ids(tokenizer), weights_hash(folder)).save(folder)
    return results


def _ruler(
    model: Any, tokenizer: Any, ruler: RulerPlan, plan: EvaluationPlan, progress: Progress
) -> list[dict[str, Any]]:
    check_positions(model, ruler.lengths)
    modes = ruler_modes(modes_of(model, plan))
    bar = progress.add_task("RULER", total=len(modes) * len(ruler.tasks) * len(ruler.lengths))
    rows = []
    for row in measure_ruler(model, tokenizer, ruler, modes):
        rows.append(row.to_dict())
        progress.update(bar, advance=1, description=str(row))
    return rows


def _code(
    model: Any, tokenizer: Any, code: CodePlan, plan: EvaluationPlan, progress: Progress
) -> list[dict[str, Any]]:
    check_positions(model, code.lengths)
    modes = modes_of(model, plan)
    bar = progress.add_task("code", total=len(modes) * len(TASKS) * len(code.lengths))
    rows = []
    for row in measure_code(model, tokenizer, code, modes):
        rows.append(row.to_dict())
        progress.update(bar, advance=1, description=str(row))
    return rows


def save_plots(results: Results, folder: Path) -> list[Path]:
    """Pictures of the first evaluation, of the retrieval probe and of RULER."""
    made = []
    for evaluation in results.evaluations[:1]:
        rows = [QualityRow(**row) for row in evaluation.rows]
        made.append(quality_figure(rows, folder / "quality.png"))
        if any(row.mode == "dense" for row in rows):
            made.append(position_figure(rows, folder / "positions.png"))
    if results.retrieval:
        made.append(retrieval_figure(results.retrieval, folder / "retrieval.png"))
    if results.ruler:
        made.append(ruler_figure(results.ruler, folder / "ruler.png"))
    return made


def add_to_adapter(results: Results, folder: Path) -> None:
    """Merge what was measured into an adapter's ``focus_results.json``."""
    known = load_results(folder) or Results()
    results.weights_sha256 = weights_hash(folder)
    known.add(results)
    save_results(known, folder)


def _tokens(text: Texts, tokenizer: Any) -> TokenText:
    return TokenText.of(text, text.token_ids(tokenizer))
