"""The card of an adapter: metadata for the Hub, a page for people, both made from the adapter's own files."""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..adapter import FocusConfig
from ..escape import escape
from .adapter_files import CONFIG_FILE, GROUPS_FILE, WEIGHTS_FILE, AdapterFileError, check_adapter
from .results import Results, load_results, mode_name

#: Marks a card that this package wrote and may write again.
GENERATED = "<!-- focus_hf:generated -->"

_TEMPLATE = "focus_card.md.jinja"


def template_folder() -> Path:
    """Where the card templates are: inside an installed package, beside it in a source checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "hub_templates"
    return installed if installed.is_dir() else package.parent / "hub_templates"


class FocusModelCard(ModelCard):
    """Card of a Focus adapter.

    Example:

    ```py
    >>> card = FocusModelCard.from_adapter("my-adapter", repo_id="me/llama-focus")
    >>> card.save("my-adapter/README.md")
    ```
    """

    default_template_path = template_folder() / _TEMPLATE

    @classmethod
    def from_adapter(
        cls,
        folder: str | os.PathLike[str],
        *,
        repo_id: str,
        base_model: str | None = None,
        results: Results | None = None,
        license: str | None = None,
        language: str | list[str] | None = None,
        datasets: str | list[str] | None = None,
    ) -> FocusModelCard:
        """Make the card of an adapter from its files; nothing needs to be answered.

        Args:
            folder: the adapter's folder; it is checked.
            repo_id: where the adapter is, or will be, on the Hub: the usage examples name it.
            base_model: Hub id of the base model; the adapter's own by default.
            results: measured quality; ``focus_results.json`` by default.
            license, language, datasets: further metadata of the Hub.

        Raises:
            AdapterFileError: the adapter is damaged.
            ValueError: a name is not one that the Hub can have.
        """
        config = check_adapter(folder)
        base = check_hub_id(base_model or config.base_model_name_or_path or "", "base model")
        check_hub_id(repo_id, "repository")
        results = results or load_results(folder)
        eval_results = _eval_results(results) if results else []
        if datasets is None and results is not None:
            datasets = list(dict.fromkeys(e.dataset for e in results.evaluations if e.dataset)) or None
        data = ModelCardData(
            base_model=base,
            library_name="focus_hf",
            pipeline_tag="text-generation",
            tags=["focus", "peft", "sparse-attention", f"base_model:adapter:{base}"],
            license=license,
            language=language,
            datasets=[datasets] if isinstance(datasets, str) else datasets,
            model_name=repo_id.split("/")[-1] if eval_results else None,
            eval_results=eval_results or None,
            base_model_relation="adapter",
        )
        environment = Environment(
            loader=FileSystemLoader(template_folder()),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        environment.filters["escape_markdown"] = escape
        environment.filters["mode"] = _mode_markdown
        text = environment.get_template(_TEMPLATE).render(
            marker=GENERATED,
            repo_id=repo_id,
            base=base,
            config=config,
            results=results,
            license=license,
            parameters=_count_parameters(config),
            megabytes=(Path(folder) / WEIGHTS_FILE).stat().st_size / 1e6,
            groups=_groups(Path(folder)),
            figures=_figures(Path(folder)),
            versions=_versions(),
        )
        return cls(f"---\n{data.to_yaml()}\n---\n\n{text}")


def is_ours(card: Path) -> bool:
    """Whether a card may be written again: there is none, or this package wrote it."""
    return not card.exists() or GENERATED in card.read_text(encoding="utf-8")


def check_hub_id(name: str, what: str) -> str:
    """A name as the Hub allows it.

    Raises:
        ValueError: it is a path on this machine, or not a valid name.
    """
    is_path = os.path.isabs(name) or name.startswith((".", "~")) or os.path.isdir(name)
    try:
        validate_repo_id(name)
    except HFValidationError:
        is_path = True
    if is_path or not name:
        option = "base_model" if what == "base model" else "repo_id"
        shown = "a folder on this machine" if os.path.isdir(name) else f"{name!r}"
        raise ValueError(
            f'The {what} is {shown}, which nobody else can load. Name it as on the Hub: {option}="org/name".'
        )
    return name


def _eval_results(results: Results) -> list[EvalResult]:
    found = []
    for evaluation in results.evaluations:
        for row in evaluation.rows:
            mode = mode_name(row["mode"], row.get("top_k"))
            found.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type=evaluation.dataset or "text",
                    dataset_name=evaluation.data,
                    dataset_revision=evaluation.revision or None,
                    metric_type="perplexity",
                    metric_name=f"perplexity at {evaluation.context_length} tokens, {mode}",
                    metric_value=float(row["perplexity"]),
                )
            )
    return found


def _groups(folder: Path) -> str | None:
    """The group report as Markdown, made from the data that lies beside the card."""
    if not (folder / GROUPS_FILE).is_file():
        return None
    from ..interpret import GroupReport  # reports are made by what stands above the Hub; their text is needed here

    report = GroupReport.from_json(folder / GROUPS_FILE)
    try:
        return report.to_markdown()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise AdapterFileError(f"{folder / GROUPS_FILE} cannot be shown ({error!r}); make it again.") from None


def _figures(folder: Path) -> list[str]:
    """Pictures of the adapter whose names are plain enough to stand in a link."""
    names = sorted(path.name for path in (folder / "figures").glob("*.png"))
    return [f"figures/{name}" for name in names if re.fullmatch(r"[\w.-]+", name, re.ASCII)]


def _mode_markdown(row: dict[str, Any]) -> str:
    return f"**Focus**, `top_k={int(row['top_k'])}`" if row["mode"] == "hard" else mode_name(row["mode"])


def _count_parameters(config: FocusConfig) -> int:
    per_layer = config.group_dim * int(config.hidden_size or 0) + config.num_groups * config.group_dim
    return per_layer * len(config.layers or [])


def _versions() -> dict[str, str]:
    found = {}
    for package in ("focus-hf", "peft", "transformers", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


__all__ = ["CONFIG_FILE", "GENERATED", "FocusModelCard", "check_hub_id", "escape", "is_ours", "template_folder"]
