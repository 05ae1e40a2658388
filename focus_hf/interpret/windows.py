"""Texts as windows of tokens; where words have known kinds, each token with the kind of its word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..texts import first_tokens, room_after, tokenize


@dataclass(frozen=True)
class Word:
    """A syntactic word.

    Args:
        start, stop: characters of its form in the document's text; words of one multi-word token share them.
        upos: universal part of speech; of code what `read_python` calls a word.
    """

    start: int
    stop: int
    upos: str


@dataclass
class Document:
    """A text and its words, in order."""

    text: str
    words: list[Word] = field(default_factory=list)


@dataclass(frozen=True)
class Window:
    """A stretch of text: token ids, int64 ``(T,)``, and each token's part of speech by number, -1 for none; ``None``
    for plain text."""

    ids: Tensor
    gold: np.ndarray | None = None


def text_windows(tokenizer: Any, texts: Sequence[str], length: int) -> list[Window]:
    """Windows of 2 to ``length`` tokens of each text, begun as the tokenizer begins one.

    Raises:
        ValueError: all texts together are shorter than two tokens.
    """
    windows, first = [], first_tokens(tokenizer)
    room = room_after(first, length)
    for text in texts:
        parts = torch.tensor(tokenize(tokenizer, text), dtype=torch.long).split(room)
        windows += [Window(torch.cat([part.new_tensor(first), part])) for part in parts if len(part) > 1]
    if not windows:
        raise ValueError("The text has fewer than two tokens; give more.")
    return windows


def gold_windows(tokenizer: Any, documents: Sequence[Document], parts: Sequence[str], length: int) -> list[Window]:
    """Windows of documents, as of `text_windows`, each token with the part of speech of the word that it belongs to:
    its number in ``parts``.

    Raises:
        ValueError: the tokenizer cannot tell where its tokens stand in the text.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer).__name__} does not say where its tokens stand in the text, which a treebank needs. "
            "Load a fast tokenizer, or use plain text."
        )
    number = {part: place for place, part in enumerate(parts)}
    windows, first = [], first_tokens(tokenizer)
    room = room_after(first, length)
    for document in documents:
        coded = tokenizer(document.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = torch.tensor(coded["input_ids"], dtype=torch.long)
        owners = align([_without_spaces(document.text, *place) for place in coded["offset_mapping"]], document.words)
        gold = np.array([-1 if owner < 0 else number[document.words[owner].upos] for owner in owners])
        for start in range(0, len(ids) - 1, room):
            stretch = slice(start, start + room)
            labels = np.concatenate([np.full(len(first), -1), gold[stretch]])
            windows.append(Window(torch.cat([ids.new_tensor(first), ids[stretch]]), labels))
    return windows


def _without_spaces(text: str, start: int, stop: int) -> tuple[int, int]:
    """Byte-level tokens take the space before a word with them, which belongs to no word; all else is as it was."""
    bare = text[start:stop].lstrip()
    return (stop - len(bare), stop) if bare else (start, stop)


def align(offsets: Sequence[tuple[int, int]], words: Sequence[Word]) -> list[int]:
    """For each sub-word token, by its start and stop in the text, the index of the word that it overlaps most, -1 for
    none; both are in order."""
    result = []
    first = 0
    for start, stop in offsets:
        while first < len(words) and words[first].stop <= start:
            first += 1
        best, best_overlap = -1, 0
        index = first
        while index < len(words) and words[index].start < stop:
            overlap = min(stop, words[index].stop) - max(start, words[index].start)
            if overlap > best_overlap:
                best, best_overlap = index, overlap
            index += 1
        result.append(best)
    return result
