"""The card of an adapter: metadata for the Hub, a page for people, both made from the adapter's own files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard_data import model_index_to_eval_results
from jinja2 import FileSystemLoader, StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment

from ..escape import escape
from ..front_matter import card_metadata, split_card
from ..records.adapter_files import GROUPS_FILE, WEIGHTS_FILE, AdapterFileError, check_adapter, weights_hash
from ..records.base_model import BaseFacts
from ..records.group_report import GroupReport
from ..records.results import Results, load_results, mode_name
from ..templates import template_folder
from .metadata import check_finite, check_hub_id, inherited, make_metadata, merge_metadata
from .sections import CardText

#: What a card is called in a repository.
CARD = "README.md"

_TEMPLATE = "focus_card.md.jinja"


class FocusModelCard(ModelCard):
    """Card of a Focus adapter.

    Example:

    ```py
    >>> card = FocusModelCard.from_adapter("my-adapter", repo_id="me/llama-focus")
    >>> card.save("my-adapter/README.md")
    ```
    """

    default_template_path = template_folder() / _TEMPLATE

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
        base: BaseFacts | None = None,
        license: str | None = None,
        language: str | list[str] | None = None,
        datasets: str | list[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        template: str | os.PathLike[str] | None = None,
    ) -> FocusModelCard:
        """Make the card of an adapter from its files; nothing needs to be answered.

        Args:
            folder: the adapter's folder; it is checked.
            repo_id: where the adapter is, or will be, on the Hub: the usage examples name it.
            base_model: Hub id of the base model; the adapter's own by default.
            results: measured quality; ``focus_results.json`` by default.
            base: what the Hub says of the base model: its licence and language are taken over.
            license, language, datasets: metadata of the Hub.
            metadata: any further metadata, over everything else.
            template: a Jinja template of one's own; see ``hub_templates`` for what it may use. It runs in a sandbox.

        Raises:
            AdapterFileError: the adapter is damaged.
            ValueError: a name is not one that the Hub can have.
        """
        config = check_adapter(folder)
        name = check_hub_id(base_model or config.base_model_name_or_path or "", "base model")
        check_hub_id(repo_id, "repository")
        results = results or load_results(folder)
        report, groups = _groups(Path(folder))
        explorer = None if results is None or not results.explorer else check_hub_id(results.explorer, "explorer")
        given = {"license": license, "language": language, "datasets": datasets}
        given = {key: value for key, value in given.items() if value} | dict(metadata or {})
        labels = report.labels if report else []
        data = merge_metadata(inherited(base), make_metadata(config, repo_id, name, results, labels))
        data = check_finite(merge_metadata(data, given))
        text = _render(
            template,
            repo_id=repo_id,
            base=name,
            config=config,
            results=results,
            explorer=explorer,
            megabytes=(Path(folder) / WEIGHTS_FILE).stat().st_size / 1e6,
            weights_sha256=weights_hash(folder),
            groups=groups,
            figures=_figures(Path(folder)),
        )
        card = cls._made(data, CardText.parse(text))
        card._inherited = frozenset(name for name in inherited(base) if name not in given)
        return card

    def refreshing(self, *older: str) -> FocusModelCard:
        """This card, as the new version of older ones of the same adapter.

        Every word and tag that a person wrote is kept: text outside the sections, sections that were changed or
        removed by hand, metadata of other origin.

        Args:
            older: whole cards, the oldest first. The text follows the last one that holds a person's words.
        """
        text, metadata = CardText.parse(self.text), dict[str, Any]()
        if older:
            followed = next((card for card in reversed(older) if own_words(card)), older[-1])
            text = _text_of(followed).refreshed(text)
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


def read_metadata(content: str) -> dict[str, Any]:
    """The YAML at the start of a card, as far as a card can hold it; empty if there is none or it cannot be read."""
    try:
        found = card_metadata(content)
    except ValueError:
        return {}
    return {name: value for name, value in found.items() if _can_stand(name, value)}


def _can_stand(name: str, value: Any) -> bool:
    """Whether the library's class for metadata survives an entry: it makes arguments and attributes of them."""
    if name in ("eval_results", "ignore_metadata_errors", "self") or hasattr(ModelCardData, name):
        return False
    try:
        if name == "model-index":
            model_index_to_eval_results(value)
    except Exception:  # of a list that is none, in as many ways
        return False
    return True


def _text_of(card: str) -> CardText:
    return CardText.parse(split_card(card)[1])


def is_ours(card: str) -> bool:
    """Whether this package wrote a card, so that it may refresh it."""
    return _text_of(card).written is not None


def own_words(card: str) -> str:
    """What a person wrote in a card, as far as words go; all of it in a card that this package did not write."""
    return _text_of(card).own_words


def read_card(folder: str | os.PathLike[str]) -> str | None:
    """The card in a folder, ``None`` if there is none."""
    path = Path(folder) / CARD
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _render(template: str | os.PathLike[str] | None, **values: Any) -> str:
    path = template_folder() / _TEMPLATE if template is None else Path(template)
    environment = SandboxedEnvironment(
        loader=FileSystemLoader([path.parent, template_folder()]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["escape_markdown"] = escape
    environment.filters["mode"] = _mode_markdown
    if not path.is_file():
        raise ValueError(f"{path} does not exist: template is a Jinja file for the card.")
    try:
        return environment.get_template(path.name).render(**values)
    except (TemplateError, TypeError, ValueError, ArithmeticError, AttributeError, KeyError) as error:
        raise ValueError(f"The card cannot be made: {error} ({type(error).__name__} in {path.name}).") from None


def _groups(folder: Path) -> tuple[GroupReport | None, str | None]:
    """The group report and its Markdown, made from the data that lies beside the card."""
    if not (folder / GROUPS_FILE).is_file():
        return None, None
    report = GroupReport.from_json(folder / GROUPS_FILE)
    try:
        return report, report.to_markdown()
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise AdapterFileError(f"{folder / GROUPS_FILE} cannot be shown ({error!r}); make it again.") from None


def _figures(folder: Path) -> list[str]:
    """Pictures of the adapter whose names are plain enough to stand in a link."""
    names = sorted(path.name for path in (folder / "figures").glob("*.png"))
    return [f"figures/{name}" for name in names if re.fullmatch(r"[\w.-]+", name, re.ASCII)]


def _mode_markdown(row: dict[str, Any]) -> str:
    return f"**Focus**, `top_k={int(row['top_k'])}`" if row["mode"] == "hard" else mode_name(row["mode"])
