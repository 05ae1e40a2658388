"""Memory with room for more, so that a cache that grows by a token does not copy all that it has."""

from __future__ import annotations

import torch
from torch import Tensor

#: Room for one part in so many of what is held, and for so many tokens at least.
GROWTH, AT_LEAST = 32, 64


class Room:
    """The memory of a tensor that grows along one dimension.

    Results share it, and none of them is ever written to: what is appended goes behind all that was handed out. A
    tensor that is not the last result (it was cropped, reordered, or two copies of a cache go on from it) is copied.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._given: Tensor | None = None

    def append(self, held: Tensor, new: Tensor, dim: int) -> Tensor:
        """``torch.cat([held, new], dim)``.

        Args:
            held: by preference what this method gave last.
            new: of the same dtype, on the same device.
            dim: along which they are joined.
        """
        length, count = held.shape[dim], new.shape[dim]
        memory = self._memory
        if memory is None or held is not self._given or length + count > memory.shape[dim] or not _writable(memory):
            shape = list(held.shape)
            shape[dim] = length + count + max(length // GROWTH, AT_LEAST)
            memory = self._memory = held.new_empty(shape)
            memory.narrow(dim, 0, length).copy_(held)
        memory.narrow(dim, length, count).copy_(new)
        self._given = memory.narrow(dim, 0, length + count)
        return self._given


def _writable(memory: Tensor) -> bool:
    return torch.is_inference_mode_enabled() or not memory.is_inference()


def can_share(held: Tensor, new: Tensor) -> bool:
    """Whether `Room.append` may take the place of ``torch.cat``: no gradient or graph remembers what it is given."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return type(held) is type(new) is Tensor and (held.dtype, held.device) == (new.dtype, new.device)
