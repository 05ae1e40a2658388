"""Metadata of a card: what the Hub reads (YAML at the top of the README)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.repocard_data import eval_results_to_model_index
from huggingface_hub.utils import HFValidationError, validate_repo_id

from ..front_matter import strings
from ..records.adapter_files import HUB_TAG, AdapterConfig, names_a_folder
from ..records.results import Results, mode_name

#: Tags by which a Focus adapter is found.
TAGS = (HUB_TAG, "peft", "sparse-attention")

#: Fields that hold several values: what a person added stays beside what this package writes.
_LISTS = ("tags", "datasets", "language", "metrics")

#: Names of groups that stand there, the most frequent ones.
_NAMES = 20

#: How the name of every perplexity begins that this package writes into ``model-index``.
_METRIC = "perplexity at "


def make_metadata(
    config: AdapterConfig, repo_id: str, base: str, results: Results | None, groups: Sequence[str] = ()
) -> dict[str, Any]:
    """Metadata from the files of an adapter at ``repo_id``; ``groups`` is what its groups are about."""
    names = ("num_groups", "top_k", "local_window", "sink_tokens")
    focus: dict[str, Any] = {name: getattr(config, name) for name in names}
    if config.by_cells:
        del focus["top_k"]
        focus |= {"routing": config.routing, "num_bands": config.num_bands}
    focus["parameters"] = config.num_parameters
    made: dict[str, Any] = {
        "base_model": base,
        "base_model_relation": "adapter",
        "library_name": "focus_hf",
        "pipeline_tag": "text-generation",
        "tags": [*TAGS, f"base_model:adapter:{base}"],
        "focus": focus,
    }
    if groups:
        focus["groups"] = list(groups)[:_NAMES]
    if results is None or not results.evaluations:
        return made
    first = results.evaluations[0]
    row, change = first.main(config.top_k, config.pairs), first.change(config.top_k, config.pairs)
    if row is not None and change is not None:
        focus |= {"perplexity_change": round(100 * change, 3), "pairs": round(row["pairs"], 4)}
        focus |= {"context_length": first.context_length, "losses": _losses(results, config)}
    made["metrics"] = ["perplexity"]
    if datasets := list(dict.fromkeys(e.dataset for e in results.evaluations if e.dataset)):
        made["datasets"] = datasets
    made["model-index"] = eval_results_to_model_index(repo_id.split("/")[-1], _eval_results(results, config))
    return made


def inherited(base: ModelCardData | None) -> dict[str, Any]:
    """What an adapter takes over from its base model's card, which may say anything."""
    if base is None:
        return {}
    license = base.license if isinstance(base.license, str) else None
    return {name: value for name, value in (("license", license), ("language", strings(base.language))) if value}


def merge_metadata(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """New values over old ones; in lists, and among evaluation results, what somebody else put there stays."""
    merged = dict(old)
    for name, value in new.items():
        if name in _LISTS:
            merged[name] = list(dict.fromkeys([*_listed(old.get(name)), *_listed(value)]))
        elif name == "model-index":
            merged[name] = _merge_index(old.get(name), value)
        else:
            merged[name] = value
    before = old.get("base_model")
    if isinstance(before, str) and before != merged.get("base_model") and "tags" in merged:
        merged["tags"] = [tag for tag in merged["tags"] if tag != f"base_model:adapter:{before}"]
    return merged


def check_finite(value: Any, name: str = "metadata") -> Any:
    """Metadata with plain numbers only: numpy's would become Python objects in YAML, and NaN, which is no measurement,
    is a `ValueError`."""
    if isinstance(value, Mapping):
        return {str(key): check_finite(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [check_finite(item, name) for item in value]
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}: measure it again, or leave it out.")
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def check_hub_id(name: str, what: str) -> str:
    """A name as the Hub allows it; `ValueError` if it is a path on this machine, or not a valid name."""
    try:
        validate_repo_id(name)
        is_path = what == "base model" and names_a_folder(name)  # loaders prefer a folder to the Hub; a push does not
    except HFValidationError:
        is_path = True
    if is_path or not name:
        option = {"base model": "base_model", "explorer": "explorer"}.get(what, "repo_id")
        shown = "a folder on this machine" if os.path.isdir(name) else f"{name!r}"
        raise ValueError(
            f'The {what} is {shown}, which nobody else can load. Name it as on the Hub: {option}="org/name".'
        )
    return name


def _losses(results: Results, config: AdapterConfig) -> dict[str, float]:
    """In per cent above dense attention, of each text, at the first length and as the adapter is set."""
    length = results.evaluations[0].context_length
    changes = {e.data: e.change(config.top_k, config.pairs) for e in results.evaluations if e.context_length == length}
    return {text: round(100 * change, 2) for text, change in changes.items() if change is not None}


def _eval_results(results: Results, config: AdapterConfig) -> list[EvalResult]:
    """One perplexity for each text, at the first length and as the adapter is set; all others are in the records."""
    found = {}
    for evaluation in results.evaluations:
        row = evaluation.main(config.top_k, config.pairs) or next(iter(evaluation.rows), None)
        if row is None or evaluation.data in found:
            continue
        mode = mode_name(row["mode"], row.get("top_k"), budget=row.get("budget"))
        found[evaluation.data] = EvalResult(
            task_type="text-generation",
            dataset_type=evaluation.dataset or "text",
            dataset_name=evaluation.data,
            dataset_revision=evaluation.revision or None,
            metric_type="perplexity",
            metric_name=f"{_METRIC}{evaluation.context_length} tokens, {mode}",
            metric_value=float(row["perplexity"]),
        )
    return list(found.values())


def _merge_index(old: Any, new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of other origin, then ours."""
    kept = []
    for model in _mappings(old):
        for result in _mappings(model.get("results")):
            metrics = [m for m in _mappings(result.get("metrics")) if not str(m.get("name")).startswith(_METRIC)]
            if metrics:
                kept.append({**result, "metrics": metrics})
    return [{**new[0], "results": [*kept, *new[0]["results"]]}]


def _mappings(value: Any) -> list[dict[str, Any]]:
    """The mappings of a list, where there is one: what somebody else wrote may be anything."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _listed(value: Any) -> list[Any]:
    """A list of plain values, where one of them may stand for itself."""
    values = value if isinstance(value, list | tuple) else [value]
    return [item for item in values if isinstance(item, str | int | float)]
