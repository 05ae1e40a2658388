"""A cache layer that makes room ahead, so that a new token is written behind the others and nothing is copied.

`DynamicLayer` copies all keys and values for every new token, which reads and writes more than dense attention reads,
and far more than Focus does. Its tensors are what they were, but as views of larger ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

#: Room for so many more tokens, and for so large a part of those that there are.
LEAST_ROOM, ROOM = 64, 1 / 32


def make_growing(cache: Cache, layer: Any) -> None:
    """Let a layer of a cache append in place, if it is a plain `DynamicLayer` that stays on its device."""
    stays = not getattr(cache, "offloading", False)
    if type(layer) is DynamicLayer and stays and not torch.compiler.is_compiling():
        layer.__class__ = GrowingLayer


class GrowingLayer(DynamicLayer):
    """`DynamicLayer`, which appends single tokens without copying the others."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See `DynamicLayer.update`."""
        keys, values = self.keys, self.values
        if key_states.shape[-2] != 1 or keys is None or values is None or torch.compiler.is_compiling():
            return super().update(key_states, value_states, *args, **kwargs)
        self.keys, self.values = self._appended("k", keys, key_states), self._appended("v", values, value_states)
        return self.keys, self.values

    def reset(self) -> None:
        """See `DynamicLayer.reset`."""
        vars(self).pop("_rooms", None)
        super().reset()

    def __getstate__(self) -> dict[str, Any]:
        """A copy makes room for itself."""
        return {name: value for name, value in vars(self).items() if name != "_rooms"}

    def _appended(self, name: str, old: Tensor, new: Tensor) -> Tensor:
        rooms: dict[str, tuple[Tensor, int]] = vars(self).setdefault("_rooms", {})
        buffer, used = rooms.pop(name, (old, -1))  # the tokens in it that are somebody's, whoever holds views of them
        if not _alike(old, new) or old.requires_grad or new.requires_grad:
            return torch.cat([old, new], dim=-2)  # which also refuses what does not fit
        length = old.shape[-2]
        if used != length or length == buffer.shape[-2] or not _begins(buffer, old):
            size = length + max(LEAST_ROOM, int(length * ROOM))
            buffer = new.new_empty((*new.shape[:-2], size, new.shape[-1]))
            buffer[..., :length, :] = old
            buffer[..., length:, :] = 0  # whoever saves a view saves all of it
        # What is written is in nobody's view, so that autograd need not know of it.
        buffer.data[..., length : length + 1, :] = new
        rooms[name] = buffer, length + 1
        return buffer[..., : length + 1, :]


def _alike(old: Tensor, new: Tensor) -> bool:
    """Whether tokens are like those before them."""
    same = old.dtype == new.dtype and old.device == new.device
    return same and old.shape[:-2] == new.shape[:-2] and old.shape[-1:] == new.shape[-1:]


def _begins(buffer: Tensor, tokens: Tensor) -> bool:
    """Whether tokens are the first ones of a buffer that may be written to."""
    same = tokens.data_ptr() == buffer.data_ptr() and tokens.stride() == buffer.stride()
    fits = tokens.dtype == buffer.dtype and tokens.shape[:-2] == buffer.shape[:-2]
    return same and fits and (torch.is_inference_mode_enabled() or not buffer.is_inference())
