"""A cache layer that makes room ahead, so that a new token is written behind the others and nothing is copied.

`DynamicLayer` copies all keys and values for every new token, which reads and writes more than dense attention reads,
and far more than Focus does. Nothing else about the layer is different, and its tensors are what they were: views of a
larger one, to which only the layer that has seen it filled last may add.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

#: Room for so many more tokens, and for so large a part of those that there are.
LEAST_ROOM, ROOM = 64, 1 / 32


def make_growing(cache: Cache, layer: Any) -> None:
    """Let a layer of a cache append in place, if it is a plain `DynamicLayer` that stays on its device."""
    if type(layer) is DynamicLayer and not cache.offloading and not torch.compiler.is_compiling():
        layer.__class__ = GrowingLayer


@dataclass
class _Room:
    """A tensor ``(B, H_kv, more than S, D)`` of which ``used`` tokens are somebody's, whoever holds views of it."""

    buffer: Tensor
    used: int


class GrowingLayer(DynamicLayer):
    """`DynamicLayer`, which appends without copying where it can."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See `DynamicLayer.update`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._appended("keys", key_states)
        self.values = self._appended("values", value_states)
        return self.keys, self.values

    def _appended(self, name: str, new: Tensor) -> Tensor:
        old: Tensor = getattr(self, name)
        if torch.compiler.is_compiling() or old.requires_grad or new.requires_grad:
            return torch.cat([old, new], dim=-2)
        rooms: dict[str, _Room] = vars(self).setdefault("_rooms", {})
        length = old.shape[-2] if old.numel() else 0
        end, room = length + new.shape[-2], rooms.get(name)
        if room is None or not _is_filled_by(room, old, end):
            size = end + max(LEAST_ROOM, int(end * ROOM))
            room = rooms[name] = _Room(new.new_empty((*new.shape[:-2], size, new.shape[-1])), length)
            if length:
                room.buffer[..., :length, :] = old
        room.buffer[..., length:end, :] = new
        room.used = end
        return room.buffer[..., :end, :]


def _is_filled_by(room: _Room, tokens: Tensor, end: int) -> bool:
    """Whether a room's tokens are these and no others, and more may be written up to ``end``."""
    buffer = room.buffer
    return (
        room.used == tokens.shape[-2]
        and end <= buffer.shape[-2]
        and tokens.data_ptr() == buffer.data_ptr()
        and tokens.stride() == buffer.stride()
        and tokens.shape[:-2] == buffer.shape[:-2]
        and (torch.is_inference_mode_enabled() or not buffer.is_inference())
    )
