"""The card of an adapter: metadata for the Hub, a page for people, both made from the adapter's own files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from huggingface_hub import ModelCard, ModelCardData, constants
from jinja2 import FileSystemLoader, StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment

from ..escape import escape
from ..files import template_folder, write_atomically
from ..records.adapter_files import (
    GROUPS_FILE,
    WEIGHTS_FILE,
    AdapterFileError,
    check_adapter,
    read_config,
    weights_hash,
)
from ..records.group_report import GroupReport
from ..records.results import Results, load_results, mode_name, setting, setting_name, to_dense
from ..records.tasks import code_tables, ruler_tables
from .figures import dial_figure
from .metadata import check_finite, check_hub_id, inherited, make_metadata, merge_metadata
from .read import CARD, own_words, read_card, read_metadata, text_of
from .sections import CardText
from .summary import layers, span, speed, summarise, weights

#: How a card's reader gets this package, in a shell; RELEASING.md says when it becomes `pip install focus-hf`.
INSTALL = "pip install .  # in a clone of focus_hf, which is not on the package index yet"

#: The package's own template.
TEMPLATE = template_folder() / "focus_card.md.jinja"

#: A base model is looked for on the public Hub, and not on one that runs on the machine on which a card is made.
_PUBLIC, _THIS_MACHINE = "https://huggingface.co", ("127.0.0.1", "localhost", "::1")


class FocusModelCard(ModelCard):
    """Card of a Focus adapter.

    Example:

    ```py
    >>> card = FocusModelCard.from_adapter("my-adapter", repo_id="me/llama-focus")
    >>> card.save("my-adapter/README.md")
    ```
    """

    default_template_path = TEMPLATE

    #: Names of metadata taken over from the base model: what an older card says goes before.
    _inherited: frozenset[str] = frozenset()

    @classmethod
    def from_adapter(
        cls,
        folder: str | os.PathLike[str],
        *,
        repo_id: str,
        base_model: str | None = None,
        results: Results | None = None,
        base: ModelCardData | None = None,
        license: str | None = None,
        language: str | list[str] | None = None,
        datasets: str | list[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        template: str | os.PathLike[str] | None = None,
        endpoint: str | None = None,
    ) -> FocusModelCard:
        """Make the card of an adapter from its files; nothing needs to be answered.

        Args:
            folder: the adapter's folder; it is checked.
            repo_id: where the adapter is, or will be, on the Hub: the usage examples name it.
            base_model: Hub id of the base model; the adapter's own by default.
            results: measured quality; ``focus_results.json`` by default.
            base: the metadata of the base model's card: its licence and language are taken over.
            license, language, datasets: metadata of the Hub.
            metadata: any further metadata, over everything else.
            template: a Jinja template of one's own; see ``hub_templates`` for what it may use. It runs in a sandbox.
            endpoint: address of the Hub that links lead to; ``HF_ENDPOINT`` by default.

        Raises:
            AdapterFileError: the adapter is damaged.
            ValueError: a name is not one that the Hub can have.
        """
        config = check_adapter(folder)
        name = check_hub_id(base_model or config.base_model_name_or_path or "", "base model")
        check_hub_id(repo_id, "repository")
        results = results or load_results(folder)
        figures = _figures(Path(folder))
        report, groups = _groups(Path(folder), figures)
        summary = summarise(results, config)
        explorer = None if results is None or not results.explorer else check_hub_id(results.explorer, "explorer")
        given = {"license": license, "language": language, "datasets": datasets}
        given = {key: value for key, value in given.items() if value} | dict(metadata or {})
        labels = report.labels if report else []
        data = merge_metadata(inherited(base), make_metadata(config, repo_id, name, results, labels))
        data = check_finite(merge_metadata(data, given))
        text = _render(
            template,
            install=INSTALL,
            hub=(hub := (endpoint or constants.ENDPOINT).rstrip("/")),
            base_hub=_PUBLIC if (urlsplit(hub).hostname or "") in _THIS_MACHINE else hub,
            repo_id=repo_id,
            base=name,
            config=config,
            results=results,
            summary=summary,
            report=report,
            layers=layers(config, report),
            explorer=explorer,
            megabytes=(Path(folder) / WEIGHTS_FILE).stat().st_size / 1e6,
            weights_sha256=weights_hash(folder),
            groups=groups,
            figures=figures,
        )
        card = cls._made(data, CardText.parse(text))
        card._inherited = frozenset(name for name in inherited(base) if name not in given)
        return card

    def refreshing(self, *older: str) -> FocusModelCard:
        """This card, as the new version of older ones of the same adapter.

        Every word and tag that a person wrote is kept: text outside the sections, sections that were changed or
        removed by hand, metadata of other origin. Under a card that a person wrote our sections follow; one that
        nobody wrote, such as PEFT leaves, is replaced.

        Args:
            older: whole cards, the oldest first. The text follows the last one that holds a person's words.
        """
        text, metadata = CardText.parse(self.text), dict[str, Any]()
        if written := [card for card in older if text_of(card).parts]:
            followed = next((card for card in reversed(written) if own_words(card)), written[-1])
            text = text_of(followed).refreshed(text)
        for card in older:
            metadata = merge_metadata(metadata, read_metadata(card))
        new = {k: v for k, v in self.metadata.items() if k not in self._inherited or not metadata.get(k)}
        return type(self)._made(merge_metadata(metadata, new), text)

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata as it stands in the file."""
        return read_metadata(str(self.content))

    @classmethod
    def _made(cls, metadata: dict[str, Any], text: CardText) -> FocusModelCard:
        head = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True, stream=None)
        return cls(f"---\n{head}---\n\n{text}")


def write_card(folder: str | os.PathLike[str], *, base_model: str | None = None) -> Path | None:
    """Make the card of an adapter from its records, or refresh it; what a person wrote stays, ours follows it.

    Args:
        folder: of the adapter.
        base_model: Hub id of the base model; the adapter's own by default.

    Returns:
        The card. ``None`` if the base model has no name on the Hub yet: then it is made when the adapter is pushed.

    Raises:
        AdapterFileError: the adapter is damaged.
    """
    folder = Path(folder)
    base = base_model or read_config(folder).base_model_name_or_path or ""
    try:
        check_hub_id(base, "base model")
    except ValueError:
        return None
    if (results := load_results(folder)) is not None:
        dial_figure(results, folder)
    card = FocusModelCard.from_adapter(folder, repo_id=f"your-name/{folder.resolve().name}", base_model=base)
    if (old := read_card(folder)) is not None:
        card = card.refreshing(old)
    write_atomically(folder / CARD, str(card).encode())
    return folder / CARD


def _render(template: str | os.PathLike[str] | None, **values: Any) -> str:
    """The text of a card, from the package's template or one's own, which runs in a sandbox."""
    path = TEMPLATE if template is None else Path(template)
    environment = SandboxedEnvironment(
        loader=FileSystemLoader([path.parent, template_folder()]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"escape_markdown": escape, "mode": _mode_markdown, "setting": _setting_markdown}
    for told in (to_dense, ruler_tables, code_tables, span, speed, weights):
        environment.filters[told.__name__] = told
    if not path.is_file():
        raise ValueError(f"{path} does not exist: template is a Jinja file for the card.")
    try:
        return environment.get_template(path.name).render(**values)
    except (TemplateError, TypeError, ValueError, ArithmeticError, AttributeError, KeyError) as error:
        raise ValueError(f"The card cannot be made: {error} ({type(error).__name__} in {path.name}).") from None


def _mode_markdown(row: dict[str, Any]) -> str:
    if row["mode"] == "hard":
        return f"**Focus**, {_setting_markdown(row)}"
    return mode_name(row["mode"], row.get("top_k"), row.get("width"), row.get("budget"))


def _setting_markdown(row: dict[str, Any]) -> str:
    return f"`{setting_name(*setting(row))}`"


def _groups(folder: Path, figures: list[str]) -> tuple[GroupReport | None, str | None]:
    """The group report and its Markdown, made from the data that lies beside the card."""
    if (report := GroupReport.load(folder)) is None:
        return None, None
    try:
        return report, report.to_markdown(figures)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise AdapterFileError(f"{folder / GROUPS_FILE} cannot be shown ({error!r}); make it again.") from None


def _figures(folder: Path) -> list[str]:
    """Pictures of the adapter whose names are plain enough to stand in a link."""
    names = sorted(path.name for path in (folder / "figures").glob("*.png"))
    return [f"figures/{name}" for name in names if re.fullmatch(r"[\w.-]+", name, re.ASCII)]
