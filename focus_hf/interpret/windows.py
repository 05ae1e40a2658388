"""Texts and treebanks as windows of tokens with their gold categories."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .collect import Window
from .treebank import Treebank, align


@dataclass
class Gold:
    """Gold categories of a treebank.

    Args:
        names: for each kind (``"upos"``, ``"deprel"``) the categories' names.
        windows: tokens with their categories.
        words: words read.
        skipped: sentences that could not be read.
    """

    names: dict[str, list[str]]
    windows: list[Window]
    words: int
    skipped: list[str] = field(default_factory=list)

    @property
    def sizes(self) -> dict[str, int]:
        return {kind: len(names) for kind, names in self.names.items()}


def text_windows(tokenizer: Any, texts: Sequence[str], length: int) -> Iterator[Window]:
    """Windows of at most ``length`` tokens of each text; the last one of a text may be shorter.

    Raises:
        ValueError: all texts together are shorter than two tokens.
    """
    found = False
    for text in texts:
        ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.long)
        for window in ids.split(length):
            if window.numel() > 1:
                found = True
                yield Window(window)
    if not found:
        raise ValueError("The text has fewer than two tokens; give more.")


def treebank_windows(tokenizer: Any, treebank: Treebank, length: int) -> Gold:
    """Windows of a treebank's documents, each token with the categories of the word that it belongs to.

    Raises:
        ValueError: the tokenizer cannot tell where its tokens stand in the text.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer).__name__} does not say where its tokens stand in the text, which a treebank needs. "
            "Load a fast tokenizer, or use plain text."
        )
    words = [word for document in treebank.documents for word in document.words]
    names = {
        "upos": sorted({word.upos for word in words}),
        "deprel": sorted({word.deprel for word in words}),
    }
    numbers = {kind: {name: number for number, name in enumerate(of_kind)} for kind, of_kind in names.items()}
    windows = []
    for document in treebank.documents:
        coded = tokenizer(document.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = torch.tensor(coded["input_ids"], dtype=torch.long)
        owners = align(_without_spaces(coded["offset_mapping"], document.text), document.words)
        gold = {
            "upos": np.array([-1 if w < 0 else numbers["upos"][document.words[w].upos] for w in owners]),
            "deprel": np.array([-1 if w < 0 else numbers["deprel"][document.words[w].deprel] for w in owners]),
        }
        for start in range(0, len(ids), length):
            part = slice(start, start + length)
            if len(ids[part]) > 1:
                windows.append(Window(ids[part], {kind: values[part] for kind, values in gold.items()}))
    return Gold(names, windows, len(words), treebank.skipped)


def _without_spaces(offsets: Sequence[tuple[int, int]], text: str) -> list[tuple[int, int]]:
    """Byte-level tokens take the space before a word with them, which belongs to no word; all else is as it was."""
    trimmed = []
    for start, stop in offsets:
        first = start
        while first < stop and text[first].isspace():
            first += 1
        trimmed.append((first if first < stop else start, stop))
    return trimmed
