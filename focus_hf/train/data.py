"""Text to windows of token ids."""

from __future__ import annotations

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
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.long)
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
