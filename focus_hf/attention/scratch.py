"""Memory that is used again from call to call. On a CPU, touching fresh pages can cost more than the work on them."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

#: Numbers that a piece may hold to be kept (16 MB of float32); larger ones are allocated each time.
KEPT_SIZE = 2**22


class _Pieces(threading.local):
    def __init__(self) -> None:
        self.by_name: dict[tuple[str, torch.dtype], Tensor] = {}


_pieces = _Pieces()


def scratch(name: str, size: int, like: Tensor) -> Tensor:
    """``size`` uninitialised numbers, with the dtype and device of ``like``; valid until the next call by this name.

    Kept for each thread, on CPU only: other devices have allocators that keep memory themselves.
    """
    if like.device.type != "cpu" or size > KEPT_SIZE:
        return like.new_empty(size)
    key = (name, like.dtype)
    piece = _pieces.by_name.get(key)
    if piece is None or piece.numel() < size:
        with torch.inference_mode(False):  # or nobody could write to it outside of inference mode
            piece = torch.empty(min(size + size // 4, KEPT_SIZE), dtype=like.dtype)
        _pieces.by_name[key] = piece
    return piece[:size]
