"""Cards that nobody wrote: what PEFT and transformers leave in a folder when a model is saved or pushed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

#: What stock saving adds to the Hub's empty template: transformers its one sentence, PEFT its version.
_ADDED = re.compile(
    r"This is the model card of a 🤗 transformers model that has been pushed on the Hub\. "
    r"This model card has been automatically generated\.|### Framework versions|- PEFT \S+"
)

#: Metadata that stock saving writes by itself; a base model that was loaded from a folder is a path there.
_GENERATED = ("base_model", "library_name")


def is_stub(text: str) -> bool:
    """Whether the text of a card, without metadata, holds nothing but what a library fills in by itself."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return all(line in _template_lines() or _ADDED.fullmatch(line) for line in lines)


def stated(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a stub that a person may have put there: everything but what the library writes by itself."""
    kept = {name: value for name, value in metadata.items() if name not in _GENERATED}
    if isinstance(tags := kept.get("tags"), list):
        kept["tags"] = [tag for tag in tags if not str(tag).startswith("base_model:")]
    return kept


@cache
def _template_lines() -> frozenset[str]:
    return frozenset(line.strip() for line in ModelCard.from_template(ModelCardData()).text.splitlines())
