"""Small tensors that follow from numbers alone, made once for each device: every layer asks for them at every token.

They are made on the device, which would be waited for if they were sent there. None of them may be written to.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def count_up(length: int, like: Tensor) -> Tensor:
    """``0, 1, 2 ...``: int64 ``(length,)``."""
    if not keeps(like):
        return torch.arange(length, device=like.device)
    return _count_up(room_for(length), like.device)[:length]


def column(numbers: tuple[int, ...], like: Tensor) -> Tensor:
    """int64 ``(numbers, 1)``."""
    return _column(numbers, like.device) if keeps(like) else like.new_tensor(numbers, dtype=torch.long)[:, None]


def starts_of_rows(counts: tuple[int, ...], like: Tensor) -> Tensor:
    """The first so many columns of each row: bool ``(counts, largest count)``."""
    if not keeps(like):
        return torch.arange(max(counts), device=like.device) < column(counts, like)
    return _starts_of_rows(counts, like.device)


def ends_of_rows(counts: tuple[int, ...], length: int, like: Tensor) -> Tensor:
    """The last so many columns of each row: bool ``(counts, length)``."""
    if not keeps(like):
        return torch.arange(length, device=like.device) >= length - column(counts, like)
    room = room_for(length)
    return _ends_of_rows(counts, room, like.device)[:, room - length :]


def starts_as_scores(counts: tuple[int, ...], like: Tensor) -> Tensor:
    """What is added to scores under `starts_of_rows`: 0 where it is ``True``, else ``-inf``: float32."""
    if not keeps(like):
        return _as_scores(starts_of_rows(counts, like))
    return _starts_as_scores(counts, like.device)


def ends_as_scores(counts: tuple[int, ...], length: int, like: Tensor) -> Tensor:
    """What is added to scores under `ends_of_rows`: 0 where it is ``True``, else ``-inf``: float32."""
    if not keeps(like):
        return _as_scores(ends_of_rows(counts, length, like))
    room = room_for(length)
    return _ends_as_scores(counts, room, like.device)[:, room - length :]


def nothing_read(routings: int, num_groups: int, like: Tensor) -> Tensor:
    """What is added to the scores of no group: ``-inf``, float32 ``(routings, num_groups)``."""
    return (_nothing_read if keeps(like) else _filled)(routings, num_groups, like.device)


def _filled(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.full((rows, columns), float("-inf"), device=device)


def _as_scores(pairs: Tensor) -> Tensor:
    return torch.zeros(pairs.shape, device=pairs.device).masked_fill_(~pairs, float("-inf"))


def keeps(like: Tensor) -> bool:
    """Whether what is made may be kept: not while a graph is traced or captured, whose tensors mean nothing later."""
    if type(like) is not Tensor or torch.compiler.is_compiling():
        return False
    return like.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def room_for(length: int) -> int:
    """So long is what is made for this length and others near it."""
    return 1 << max(length - 1, 0).bit_length()


@functools.lru_cache(maxsize=64)
def _count_up(length: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # or it could be used there only
        return torch.arange(length, device=device)


@functools.lru_cache(maxsize=1024)
def _column(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.cat([torch.full((1, 1), number, device=device) for number in numbers])


@functools.lru_cache(maxsize=1024)
def _starts_of_rows(counts: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(max(counts), device=device) < _column(counts, device)


@functools.lru_cache(maxsize=256)
def _ends_of_rows(counts: tuple[int, ...], length: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(length, device=device) >= length - _column(counts, device)


@functools.lru_cache(maxsize=1024)
def _starts_as_scores(counts: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return _as_scores(_starts_of_rows(counts, device))


@functools.lru_cache(maxsize=256)
def _ends_as_scores(counts: tuple[int, ...], length: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return _as_scores(_ends_of_rows(counts, length, device))


@functools.lru_cache(maxsize=256)
def _nothing_read(routings: int, num_groups: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return _filled(routings, num_groups, device)
