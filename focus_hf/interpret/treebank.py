"""Treebanks (Universal Dependencies, or code): words with their parts of speech, and where they stand in the text."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .document import Document, Word
from .source_code import read_python


@dataclass
class Treebank:
    """What was read.

    Args:
        documents: one for each ``# newdoc``.
        skipped: sentences that could not be read: line and cause.
    """

    documents: list[Document]
    skipped: list[str] = field(default_factory=list)


def read_treebank(*paths: str | os.PathLike[str]) -> Treebank:
    """Read CoNLL-U files, and Python files (`.py`), see `focus_hf.interpret.source_code.read_python`.

    Sentences (and Python files) with errors are left out, counted, and named by file, line and cause.

    Raises:
        ValueError: nothing could be read.
        OSError: a file cannot be read.
    """
    documents: list[Document] = []
    skipped: list[str] = []
    for path in map(Path, paths):
        read = _read_python if path.suffix == ".py" else _read_file
        read(path, documents, skipped)
    documents = [document for document in documents if document.words]
    if not documents:
        cause = f" The first error: {skipped[0]}." if skipped else ""
        raise ValueError(f"{', '.join(Path(path).name for path in paths)}: no sentence could be read.{cause}")
    return Treebank(documents, skipped)


def _read_file(path: Path, documents: list[Document], skipped: list[str]) -> None:
    documents.append(Document(""))
    for line, block in _blocks(path.read_text(encoding="utf-8", errors="replace")):
        if any(row.startswith("# newdoc") for row in block):
            documents.append(Document(""))
        for place, row in enumerate(block):
            if not row.startswith("#") and row.count("\t") != 9:
                columns = row.count("\t") + 1
                skipped.append(f"{path.name}, line {line + place}: {columns} columns, expected 10 with tabs between")
                break
        else:
            _read_sentence(documents[-1], block, f"{path.name}, line {line}", skipped)


def _read_python(path: Path, documents: list[Document], skipped: list[str]) -> None:
    try:
        documents.append(read_python(path.read_text(encoding="utf-8", errors="replace")))
    except ValueError as error:
        skipped.append(f"{path.name}: {error}")


def _read_sentence(document: Document, block: list[str], place: str, skipped: list[str]) -> None:
    from conllu import parse

    try:
        (sentence,) = parse("\n".join(block) + "\n\n")
        _append(document, sentence)
    except Exception as error:  # noqa: BLE001  (the parser raises several kinds, all of them about the text)
        skipped.append(f"{place}: {str(error).splitlines()[0] if str(error) else 'no words'}")


def _blocks(text: str) -> Iterator[tuple[int, list[str]]]:
    """Sentences: the number of the first line, and the lines."""
    block: list[str] = []
    for number, row in enumerate([*text.split("\n"), ""], 1):
        if row.strip():
            block.append(row)
        elif block:
            yield number - len(block), block
            block = []


def _append(document: Document, sentence: Any) -> None:
    """Add a sentence's text and words, or nothing at all.

    Raises:
        ValueError: its words are not in its text, or lack their parts of speech.
    """
    rows = _surface(sentence)
    text = sentence.metadata.get("text") or _spelled(rows)
    separator = "\n" if document.text else ""
    shift = len(document.text) + len(separator)
    words: list[Word] = []
    place = 0
    for form, _, members in rows:
        start = text.find(form, place)
        if start < 0:
            raise ValueError(f"word {form!r} is not in the sentence's text")
        place = start + len(form)
        for member in members:
            if not member["upos"] or member["upos"] == "_":
                raise ValueError(f"word {form!r} has no part of speech")
            words.append(Word(shift + start, shift + place, member["upos"]))
    if not words:
        raise ValueError("no words")
    document.text += separator + text
    document.words += words


def _surface(sentence: Any) -> list[tuple[str, bool, list[Any]]]:
    """Tokens as written: form, whether a space follows, and the syntactic words in it (two in "don't")."""
    rows: list[tuple[str, bool, list[Any]]] = []
    covered: set[int] = set()
    members = {token["id"]: token for token in sentence if isinstance(token["id"], int)}
    for token in sentence:
        identifier = token["id"]
        space = (token["misc"] or {}).get("SpaceAfter") != "No"
        if isinstance(identifier, tuple):
            if identifier[1] != "-":
                continue  # an empty node, which is not written
            span = range(identifier[0], identifier[2] + 1)
            covered.update(span)
            rows.append((token["form"], space, [members[number] for number in span]))
        elif identifier not in covered:
            rows.append((token["form"], space, [token]))
    return rows


def _spelled(rows: Sequence[tuple[str, bool, list[Any]]]) -> str:
    return "".join(form + (" " if space else "") for form, space, _ in rows).rstrip()


def align(offsets: Sequence[tuple[int, int]], words: Sequence[Word]) -> list[int]:
    """For each sub-word token the index of the word that it overlaps most, -1 for none.

    Args:
        offsets: start and stop of each token in the text, in order.
        words: of the text, in order.
    """
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
