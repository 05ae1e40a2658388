"""Texts and treebanks as windows of tokens with their parts of speech."""

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
    """A treebank as it is read.

    Args:
        parts: names of its parts of speech.
        windows: tokens with their parts of speech.
        words: words read.
        skipped: sentences that could not be read.
    """

    parts: list[str]
    windows: list[Window]
    words: int
    skipped: list[str] = field(default_factory=list)


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
    """Windows of a treebank's documents, each token with the part of speech of the word that it belongs to.

    Raises:
        ValueError: the tokenizer cannot tell where its tokens stand in the text.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer).__name__} does not say where its tokens stand in the text, which a treebank needs. "
            "Load a fast tokenizer, or use plain text."
        )
    words = [word for document in treebank.documents for word in document.words]
    parts = sorted({word.upos for word in words})
    windows = []
    for document in treebank.documents:
        coded = tokenizer(document.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = torch.tensor(coded["input_ids"], dtype=torch.long)
        owners = align(_without_spaces(coded["offset_mapping"], document.text), document.words)
        gold = np.array([-1 if owner < 0 else parts.index(document.words[owner].upos) for owner in owners])
        for start in range(0, len(ids), length):
            part = slice(start, start + length)
            if len(ids[part]) > 1:
                windows.append(Window(ids[part], gold[part]))
    return Gold(parts, windows, len(words), treebank.skipped)


def _without_spaces(offsets: Sequence[tuple[int, int]], text: str) -> list[tuple[int, int]]:
    """Byte-level tokens take the space before a word with them, which belongs to no word; all else is as it was."""
    trimmed = []
    for start, stop in offsets:
        first = start
        while first < stop and text[first].isspace():
            first += 1
        trimmed.append((first if first < stop else start, stop))
    return trimmed
