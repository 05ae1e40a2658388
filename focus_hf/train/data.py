"""Windows of token ids as training takes them, and a check that they hold what it learns from."""

from __future__ import annotations

from torch import Tensor
from torch.utils.data import Dataset

from ..settings import FocusSettings


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


def check_reach(length: int, settings: FocusSettings) -> None:
    """Make sure that windows hold pairs of tokens that groups decide about; centroids learn from nothing else.

    Raises:
        ValueError: every pair is within the local window, with a sink, or below ``dense_below``.
    """
    shortest = max(settings.local_window + settings.sink_tokens + 2, settings.dense_below + 1)
    if length < shortest:
        raise ValueError(
            f"seq_len is {length}, but centroids learn from pairs of tokens that groups decide about, and there are "
            f"none: local_window is {settings.local_window}, sink_tokens is {settings.sink_tokens} and dense_below is "
            f"{settings.dense_below}. Use a seq_len of at least {shortest}, better several times that, or smaller "
            "values of these."
        )
