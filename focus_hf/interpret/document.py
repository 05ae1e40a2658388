"""A text with words whose categories are known."""

from __future__ import annotations

from dataclasses import dataclass, field


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
