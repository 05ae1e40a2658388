"""Texts to windows of token ids: text files and data sets, packed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset


def tokenize_windows(tokenizer: Any, text: str, length: int, stride: int | None = None) -> Tensor:
    """Cut a text into windows of ``length`` tokens; an incomplete last one is dropped.

    Args:
        tokenizer: a transformers tokenizer.
        text: any text.
        length: tokens per window.
        stride: tokens from one window's start to the next; ``length`` by default, so that windows do not overlap.

    Returns:
        int64 ``(N, length)``.

    Raises:
        ValueError: the text is shorter than one window.
    """
    return pack([tokenize(tokenizer, text)], length, stride)


def tokenize(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, without special tokens."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def pack(
    documents: Sequence[Sequence[int]], length: int, stride: int | None = None, between: int | None = None
) -> Tensor:
    """Lay documents end to end and cut windows of ``length`` tokens.

    Args:
        documents: token ids of each.
        length: tokens per window.
        stride: tokens from one window's start to the next, ``length`` by default.
        between: token id that ends each document when there are several.

    Returns:
        int64 ``(N, length)``.

    Raises:
        ValueError: all of it is shorter than one window.
    """
    ends = [] if between is None or len(documents) == 1 else [between]
    ids = torch.tensor([token for document in documents for token in (*document, *ends)], dtype=torch.long)
    if ids.numel() < length:
        raise ValueError(
            f"The text has {ids.numel()} tokens, fewer than one window of {length}. "
            "Give more text or a shorter window."
        )
    return ids.unfold(0, length, stride or length)


class WindowDataset(Dataset):
    """Windows of token ids as the Trainer wants them.

    Args:
        windows: int64 ``(N, T)``.
    """

    def __init__(self, windows: Tensor) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return self.windows.shape[0]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


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

    def load(self) -> Texts:
        """Read everything.

        Raises:
            ValueError: neither files nor a data set, a missing column, or no text at all.
            OSError: a file cannot be read.
        """
        if bool(self.files) == bool(self.dataset):
            raise ValueError("Give either text files or the name of a data set.")
        texts = self._from_files() if self.files else self._from_dataset()
        if not any(text.strip() for text in texts.documents):
            raise ValueError(f"{texts.name} holds no text.")
        return texts

    def _from_files(self) -> Texts:
        documents: list[str] = []
        digest = hashlib.sha256()
        for name in self.files:
            content = Path(name).read_bytes()
            digest.update(content)
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{name} is not UTF-8 text ({error.reason} at byte {error.start}).") from None
            documents += self._lines(name, text) if name.endswith(".jsonl") else [text]
        names = ", ".join(os.path.basename(name) for name in self.files)  # folders stay on this machine
        return Texts(documents, names, f"sha256:{digest.hexdigest()[:16]}")

    def _lines(self, name: str, text: str) -> list[str]:
        documents = []
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip():
                continue
            try:
                documents.append(str(json.loads(line)[self.column]))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{name}, line {number}: no JSON object with {self.column!r} ({error}).") from None
        return documents

    def _from_dataset(self) -> Texts:
        import datasets

        assert self.dataset is not None
        loaded = datasets.load_dataset(self.dataset, self.subset, split=self.split, revision=self.revision)
        if self.column not in loaded.column_names:
            raise ValueError(
                f"Data set {self.dataset} has no column {self.column!r}; it has {', '.join(loaded.column_names)}."
            )
        name = os.path.basename(os.path.normpath(self.dataset)) if os.path.isdir(self.dataset) else self.dataset
        details = " ".join(part for part in (self.subset, self.split) if part)
        revision = self.revision or _dataset_commit(loaded) or ""
        return Texts(
            list(loaded[self.column]), f"{name} ({details})", revision, on_hub=not os.path.isdir(self.dataset)
        )


@dataclass
class Texts:
    """Documents and what a card says about them.

    Args:
        documents: the texts.
        name: for people; no folders of this machine.
        revision: a data set's commit, or the hash of files.
        on_hub: the name is that of a data set on the Hub.
    """

    documents: list[str]
    name: str
    revision: str = ""
    on_hub: bool = False

    def split_tail(self, share: float) -> tuple[Texts, Texts]:
        """Everything but the last characters, and those, for validation."""
        keep = int(sum(map(len, self.documents)) * (1 - share))
        head: list[str] = []
        tail: list[str] = []
        for document in self.documents:
            head.append(document[:keep])
            tail.append(document[keep:])
            keep = max(0, keep - len(document))
        return (
            replace(self, documents=[text for text in head if text]),
            replace(self, documents=[text for text in tail if text], name=f"{self.name}, last {share:.0%}"),
        )

    def windows(self, tokenizer: Any, length: int, stride: int | None = None) -> Tensor:
        """Tokenize and `pack`, documents ended by the tokenizer's end-of-text token."""
        ids = [tokenize(tokenizer, text) for text in self.documents]
        return pack(ids, length, stride, getattr(tokenizer, "eos_token_id", None))


def _dataset_commit(loaded: Any) -> str | None:
    """The commit that a data set was downloaded from, as the library records it in its cache."""
    checksums = (loaded.info.download_checksums or {}) if loaded.info else {}
    for url in checksums:
        _, found, rest = str(url).partition("@")
        if found:
            return rest.split("/")[0]
    return None


def check_vocabulary(windows: Tensor, vocabulary: int, source: str) -> None:
    """Make sure that a tokenizer belongs to a model.

    Raises:
        ValueError: a token id that the model does not have.
    """
    largest = int(windows.max())
    if largest >= vocabulary:
        raise ValueError(
            f"The tokenizer does not fit the model: {source} has token id {largest}, the model's vocabulary ends at "
            f"{vocabulary - 1}. Name the model's own tokenizer."
        )


def check_length(length: int, config: Any) -> None:
    """Make sure that windows fit into a model's positions.

    Raises:
        ValueError: they do not.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if length < 2:
        raise ValueError(f"seq_len must be at least 2, got {length}.")
    if positions is not None and length > positions:
        raise ValueError(f"seq_len is {length}, but the model has {positions} positions. Use at most {positions}.")
