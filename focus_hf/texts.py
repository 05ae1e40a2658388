"""Texts from files and data sets, as documents, token ids and windows."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def tokenize_windows(tokenizer: Any, text: str, length: int, stride: int | None = None) -> Tensor:
    """Cut a text into windows of ``length`` tokens, each begun as the tokenizer begins a text (`first_tokens`); an
    incomplete last one is dropped.

    Args:
        tokenizer: a transformers tokenizer.
        text: any text.
        length: tokens per window.
        stride: tokens from one window's start to the next; by default no token of the text is in two windows.

    Returns:
        int64 ``(N, length)``.

    Raises:
        ValueError: the text is shorter than one window.
    """
    return Texts([text], "text").windows(tokenizer, length, stride)


def tokenize(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, without special tokens."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def first_tokens(tokenizer: Any) -> list[int]:
    """The special tokens that a tokenizer puts before a text, such as ``<bos>``; many put none.

    Models that were trained with them are lost without: Gemma 3 270M has three times the perplexity.
    """
    whole, bare = list(tokenizer("1", add_special_tokens=True, verbose=False)["input_ids"]), tokenize(tokenizer, "1")
    starts = range(len(whole) - len(bare) + 1)
    return next((whole[:start] for start in starts if whole[start : start + len(bare)] == bare), [])


def room_after(first: Sequence[int], length: int) -> int:
    """Tokens of text in a window of ``length`` that begins with others.

    Raises:
        ValueError: there is no room.
    """
    if (room := length - len(first)) < 1:
        raise ValueError(f"A window of {length} tokens has no room for text after the tokenizer's first {len(first)}.")
    return room


def cut(ids: Tensor, length: int, stride: int | None = None, first: Sequence[int] = ()) -> Tensor:
    """Windows of ``length`` tokens, ``first`` and so many of a text's, see `tokenize_windows`."""
    import torch

    room = room_after(first, length)
    if ids.numel() < room:
        raise ValueError(
            f"The text has {ids.numel()} tokens, fewer than one window of {length}. "
            "Give more text or a shorter window."
        )
    # A stride of the length is one at which nothing overlaps and nothing is left out.
    windows = ids.unfold(0, room, room if stride is None or room < stride <= length else stride)
    if not first:
        return windows  # of the same memory, however much they overlap
    return torch.cat([ids.new_tensor(list(first)).expand(len(windows), -1), windows], dim=1)


@dataclass(frozen=True)
class TextSource:
    """Where texts come from: files on this machine, or a data set of the ``datasets`` library.

    Args:
        files: text files (one document each), or ``.jsonl`` files (one document a line).
        dataset: name on the Hub, or a folder that ``datasets.load_dataset`` reads.
        subset: configuration of the data set.
        split: of the data set, such as ``"train"`` or ``"train[:1%]"``.
        revision: of the data set, a commit for choice.
        column: that holds the text.
    """

    files: tuple[str, ...] = ()
    dataset: str | None = None
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    column: str = "text"

    def load(self, max_characters: int | None = None, seed: int = 0) -> Texts:
        """Read the texts.

        Args:
            max_characters: of a data set, read documents in random order until there are as many; files are read
                whole.
            seed: of that order.

        Raises:
            ValueError: neither files nor a data set, a missing column, or no text at all.
            OSError: a file cannot be read.
        """
        if bool(self.files) == bool(self.dataset):
            raise ValueError("Give either text files or the name of a data set.")
        texts = self._from_files() if self.files else self._from_dataset(max_characters, seed)
        if not any(text.strip() for text in texts.documents):
            raise ValueError(f"{texts.name} holds no text.")
        return texts

    def _from_files(self) -> Texts:
        documents: list[str] = []
        for name in self.files:
            content = Path(name).read_bytes()
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{name} is not UTF-8 text ({error.reason} at byte {error.start}).") from None
            documents += self._lines(name, text) if name.endswith(".jsonl") else [text]
        names = ", ".join(os.path.basename(name) for name in self.files)  # folders stay on this machine
        return Texts(documents, names, hash_of(self.files), source={"files": names, "column": self.column})

    def _lines(self, name: str, text: str) -> list[str]:
        documents = []
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            try:
                documents.append(str(json.loads(line)[self.column]))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{name}, line {number}: no JSON object with {self.column!r} ({error}).") from None
        return documents

    def _from_dataset(self, max_characters: int | None, seed: int) -> Texts:
        import datasets

        assert self.dataset is not None
        rows = datasets.load_dataset(self.dataset, self.subset, split=self.split, revision=self.revision)
        if self.column not in rows.column_names:
            raise ValueError(
                f"Data set {self.dataset} has no column {self.column!r}; it has {', '.join(rows.column_names)}."
            )
        on_hub = None if os.path.isdir(self.dataset) else self.dataset
        name = on_hub or os.path.basename(os.path.normpath(self.dataset))
        details = " ".join(part for part in (self.subset, self.split) if part)
        documents: list[str] = []
        total = 0
        for row in rows if max_characters is None else rows.shuffle(seed):
            if max_characters is not None and total >= max_characters:
                break
            documents.append(str(row[self.column]))
            total += len(documents[-1])
        if len(documents) < len(rows):
            details += f", {len(documents):,} of {len(rows):,} documents"
        source: dict[str, Any] = {"dataset": name, "subset": self.subset, "split": self.split, "column": self.column}
        source |= {"max_characters": max_characters, "seed": seed}
        revision = self.revision or dataset_commit(rows.info) or ""
        return Texts(documents, f"{name} ({details})", revision, on_hub, source)


@dataclass
class Texts:
    """Documents and what a card says about them.

    Args:
        documents: the texts.
        name: for people; no folders of this machine.
        revision: a data set's commit, or the hash of files.
        dataset: Hub id, if it is a data set on the Hub.
        source: how the same documents are read again, see `read_again`.
    """

    documents: list[str]
    name: str
    revision: str = ""
    dataset: str | None = None
    source: dict[str, Any] = field(default_factory=dict)

    def split_tail(self, share: float) -> tuple[Texts, Texts]:
        """Everything but the last characters, and those, for validation."""
        keep = int(sum(map(len, self.documents)) * (1 - share))
        head: list[str] = []
        tail: list[str] = []
        for document in self.documents:
            head.append(document[:keep])
            tail.append(document[keep:])
            keep = max(0, keep - len(document))
        source, name = {**self.source, "tail": share}, f"{self.name}, last {share:.0%}"
        return (
            replace(self, documents=[*filter(None, head)], source={**source, "part": "head"}),
            replace(self, documents=[*filter(None, tail)], name=name, source={**source, "part": "tail"}),
        )

    def windows(self, tokenizer: Any, length: int, stride: int | None = None) -> Tensor:
        """See `tokenize_windows`; documents follow each other."""
        return cut(self.token_ids(tokenizer), length, stride, first_tokens(tokenizer))

    def token_ids(self, tokenizer: Any) -> Tensor:
        """All documents as int64 ``(n,)``, each ended by the tokenizer's end-of-text token if there are several."""
        import torch

        end = getattr(tokenizer, "eos_token_id", None)
        ends = [] if end is None or len(self.documents) == 1 else [end]
        return torch.tensor([token for text in self.documents for token in (*tokenize(tokenizer, text), *ends)]).long()


def hash_of(files: Sequence[str | os.PathLike[str]]) -> str:
    """What stands for the content of files as their revision."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(Path(file).read_bytes())
    return f"sha256:{digest.hexdigest()[:16]}"


def read_again(source: dict[str, Any], revision: str, files: Sequence[str] = ()) -> Texts | None:
    """The documents that `Texts.source` describes.

    Args:
        source: of the texts.
        revision: of the texts; files with another hash, and data sets of another commit, are not the same.
        files: where the files may be on this machine.

    Returns:
        The texts, ``None`` if these files are not here or the data set is not on the Hub.
    """
    again: Texts | None = None
    if source.get("dataset"):
        if revision and not revision.startswith("sha256:"):
            wanted: dict[str, Any] = {name: source.get(name) for name in ("dataset", "subset", "split", "column")}
            there = TextSource(revision=revision, **wanted)
            with suppress(OSError, ValueError):
                again = there.load(source.get("max_characters"), source.get("seed", 0))
    elif names := tuple(map(str, files)):
        candidates = [names, *((name,) for name in names)]
        loaded = (TextSource(some, column=source.get("column", "text")).load() for some in candidates)
        again = next((texts for texts in loaded if texts.revision == revision), None)
    if again is None or "tail" not in source:
        return again
    head, tail = again.split_tail(float(source["tail"]))
    return head if source.get("part") == "head" else tail


def dataset_commit(info: Any) -> str | None:
    """The commit that a data set was downloaded from, as the ``datasets`` library notes it (``DatasetInfo``)."""
    for url in getattr(info, "download_checksums", None) or {}:
        _, found, rest = str(url).partition("@")
        if found:
            return rest.split("/")[0]
    return None
