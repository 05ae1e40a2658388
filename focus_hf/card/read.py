"""Read a card, whoever wrote it; or nobody, where PEFT and transformers left what they fill in by themselves."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard_data import model_index_to_eval_results

from ..front_matter import card_metadata, split_card
from .sections import CardText

#: What a card is called in a repository.
CARD = "README.md"

#: What stock saving adds to the Hub's empty template: transformers its one sentence, PEFT its version.
_ADDED = re.compile(
    r"This is the model card of a 🤗 transformers model that has been pushed on the Hub\. "
    r"This model card has been automatically generated\.|### Framework versions|- PEFT \S+"
)

#: Metadata that stock saving writes by itself; a base model that was loaded from a folder is a path there.
_GENERATED = ("base_model", "library_name")


def read_metadata(content: str) -> dict[str, Any]:
    """The YAML at the start of a card, as far as a card can hold it; empty if there is none or it cannot be read.

    Of a card that nobody wrote, only what a person may have added.
    """
    try:
        found = card_metadata(content)
    except ValueError:
        return {}
    found = {name: value for name, value in found.items() if _can_stand(name, value)}
    if is_stub(split_card(content)[1]):
        found = {name: value for name, value in found.items() if name not in _GENERATED}
        if isinstance(tags := found.get("tags"), list):
            found["tags"] = [tag for tag in tags if not str(tag).startswith("base_model:")]
    return found


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


def is_stub(text: str) -> bool:
    """Whether the text of a card, without metadata, holds nothing but what a library fills in by itself."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return all(line in _template_lines() or _ADDED.fullmatch(line) for line in lines)


@cache
def _template_lines() -> frozenset[str]:
    return frozenset(line.strip() for line in ModelCard.from_template(ModelCardData()).text.splitlines())


def text_of(card: str) -> CardText:
    """The text of a card in its sections, without the metadata; nothing of a card that nobody wrote."""
    text = split_card(card)[1]
    return CardText.parse("" if is_stub(text) else text)


def is_ours(card: str) -> bool:
    """Whether this package wrote a card, so that it may refresh it."""
    return text_of(card).written is not None


def own_words(card: str) -> str:
    """What a person wrote in a card, as far as words go; all of it in a card that this package did not write."""
    words = text_of(card).own_words
    return "" if is_stub(words) else words  # PEFT puts its version under any card


def read_card(folder: str | os.PathLike[str]) -> str | None:
    """The card in a folder, ``None`` if there is none."""
    path = Path(folder) / CARD
    return path.read_text(encoding="utf-8") if path.is_file() else None
