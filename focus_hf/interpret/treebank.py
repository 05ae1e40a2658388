"""Treebanks (Universal Dependencies, or code): words with their parts of speech, and where they stand in the text."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from .source_code import read_python
from .windows import Document, Word


@dataclass
class Treebank:
    """What was read.

    Args:
        documents: one for each ``# newdoc``.
        skipped: sentences that could not be read: line and cause.
    """

    documents: list[Document] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def read_treebank(*paths: str | os.PathLike[str]) -> Treebank:
    """Read CoNLL-U files, and Python files (`.py`), see `focus_hf.interpret.source_code.read_python`.

    Sentences (and Python files) with errors are left out, counted, and named by file, line and cause.

    Raises:
        ValueError: nothing could be read.
        OSError: a file cannot be read.
    """
    found = Treebank()
    for path in map(Path, paths):
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.suffix != ".py":
            _read_conllu(text, path.name, found)
            continue
        try:
            found.documents.append(read_python(text))
        except ValueError as error:
            found.skipped.append(f"{path.name}: {error}")
    found.documents = [document for document in found.documents if document.words]
    if not found.documents:
        cause = f" The first error: {found.skipped[0]}." if found.skipped else ""
        raise ValueError(f"{', '.join(Path(path).name for path in paths)}: no sentence could be read.{cause}")
    return found


def _read_conllu(text: str, name: str, found: Treebank) -> None:
    from conllu import parse

    found.documents.append(Document(""))
    for is_sentence, numbered in groupby(enumerate(text.split("\n"), 1), key=lambda row: bool(row[1].strip())):
        if not is_sentence:
            continue
        lines, block = zip(*numbered, strict=True)
        if any(row.startswith("# newdoc") for row in block):
            found.documents.append(Document(""))
        columns = [10 if row.startswith("#") else row.count("\t") + 1 for row in block]
        if wrong := [(line, count) for line, count in zip(lines, columns, strict=True) if count != 10]:
            line, count = wrong[0]
            found.skipped.append(f"{name}, line {line}: {count} columns, expected 10 with tabs between")
            continue
        try:
            (sentence,) = parse("\n".join(block) + "\n\n")
            _append(found.documents[-1], sentence)
        except Exception as error:  # noqa: BLE001  (the parser raises several kinds, all of them about the text)
            found.skipped.append(f"{name}, line {lines[0]}: {(str(error).splitlines() or ['no words'])[0]}")


def _append(document: Document, sentence: Any) -> None:
    """Add a sentence's text and words, or nothing at all.

    Raises:
        ValueError: its words are not in its text, or lack their parts of speech.
    """
    rows = list(_surface(sentence))
    text = sentence.metadata.get("text") or "".join(form + space for form, space, _ in rows).rstrip()
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


def _surface(sentence: Any) -> Iterator[tuple[str, str, list[Any]]]:
    """Tokens as written: form, the space that follows, and the syntactic words in it (two in "don't")."""
    members = {token["id"]: token for token in sentence if isinstance(token["id"], int)}
    covered: set[int] = set()
    for token in sentence:
        number = token["id"]
        span = range(number[0], number[2] + 1) if isinstance(number, tuple) else range(number, number + 1)
        is_empty = isinstance(number, tuple) and number[1] != "-"  # an empty node, which is not written
        if not is_empty and span[0] not in covered:
            covered.update(span)
            space = "" if (token["misc"] or {}).get("SpaceAfter") == "No" else " "
            yield token["form"], space, [members[member] for member in span]
