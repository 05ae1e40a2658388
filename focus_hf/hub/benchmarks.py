"""Results of registered benchmarks, in the files from which the Hub fills leaderboards (``.eval_results/*.yaml``)."""

from __future__ import annotations

from pathlib import Path

import yaml
from huggingface_hub import EvalResultEntry, HfApi, eval_result_entries_to_yaml

from ..files import write_atomically
from ..front_matter import MAX_CHARACTERS, read_yaml
from ..records.results import Results
from .bounds import Bounds
from .errors import HubError, hub_errors

FOLDER = ".eval_results"

#: Describes the tasks of a data set that is registered as a benchmark.
_DECLARATION = "eval.yaml"


def write_benchmark_results(results: Results | None, folder: Path, api: HfApi) -> list[Path]:
    """Write a file for each data set that declares itself a benchmark and has a task of ours.

    Perplexities and other data sets stay in the card's ``model-index``: the Hub would not show them here.

    Args:
        results: of the adapter.
        folder: of the adapter.
        api: asks for the data sets.

    Returns:
        The files.
    """
    written = []
    rows = results.benchmarks if results else []
    for dataset in dict.fromkeys(row["dataset"] for row in rows if row.get("dataset")):
        tasks = _declared_tasks(dataset, api)
        entries: list[EvalResultEntry] = []
        for row in rows:
            task = row["task"] if row["task"] in tasks else tasks[0] if len(tasks) == 1 else None
            if row.get("dataset") == dataset and task and not any(e.task_id == task for e in entries):
                notes = f"Focus sparse attention; dense attention of the base model: {row['dense']:.4f}"
                entries.append(EvalResultEntry(dataset, task, float(row["focus"]), notes=notes))
        if entries:
            path = folder / FOLDER / f"{dataset.replace('/', '__')}.yaml"
            text = yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False, allow_unicode=True)
            write_atomically(path, text.encode())
            written.append(path)
    return written


def _declared_tasks(dataset: str, api: HfApi) -> list[str]:
    try:
        with hub_errors(dataset, api.endpoint):
            path = Bounds(api.endpoint).run(
                lambda: api.hf_hub_download(dataset, _DECLARATION, repo_type="dataset"),
                largest=MAX_CHARACTERS,
                is_file=True,
            )
        declared = read_yaml(Path(path).read_text("utf-8", "replace"))
        return [str(task["id"]) for task in declared["tasks"]]
    except (HubError, KeyError, OSError, TypeError, ValueError):
        return []
