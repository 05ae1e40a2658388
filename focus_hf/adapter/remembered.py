"""What stands beside a cache: the groups of the keys in it, for as long as nobody else touched them.

A key's group is a function of that key, so what is kept is a cache of a function. It holds for the tensors that the
cache had when we last saw them; whatever a cache does (crop, reorder, select, copy, quantise, offload), its tensors
are then others, and no code of ours has to follow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache

#: Attribute of a cache layer, so that it goes where the layer goes (a copy, a pickle).
_NAME = "focus_memory"

#: Cosines and sines of tokens' positions, ``(B or 1, T, n)`` each.
Angles = tuple[Tensor, Tensor]

#: Angles of the last tokens, one each, whose groups are not found yet (`routers.groups_of_keys`).
Waiting = tuple[Angles | None, ...]


def find_cache(values: tuple[Any, ...]) -> Cache | None:
    """The self-attention cache among a module's arguments (models name the argument differently)."""
    for value in values:
        if isinstance(value, EncoderDecoderCache):
            return value.self_attention_cache
        if isinstance(value, Cache):
            return value
    return None


def cache_layer(cache: Cache, layer_idx: int) -> Any:
    """The cache's layer, created if the cache grows lazily."""
    while len(cache.layers) <= layer_idx and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    return cache.layers[layer_idx]


@dataclass
class Memory:
    """What is known of the keys of a cache layer."""

    tensors: object  #: what the groups were made by, see `FocusLayer.made_by`
    length: int  #: tokens that the layer has seen
    groups: Tensor | None  #: see `Call.groups`; ``None`` where nobody asked
    marks: dict[str, tuple[Any, int]]  #: the tensors (and numbers) of the layer after our last call
    keys: Tensor | None  #: the keys then, where the layer holds them as they are
    complete: bool = True  #: the groups of every token are known
    waiting: Waiting = ()


def recall(layer: Any, adapter: str, tensors: object) -> tuple[Memory | None, bool]:
    """What is known of the keys of a cache's layer under an adapter (``tensors``: what groups are now made by, see
    `FocusLayer.made_by`), and whether the layer is as it was left then."""
    memory: Memory | None = getattr(layer, _NAME, {}).get(adapter)
    if memory is None or torch.compiler.is_compiling():  # a graph is traced for a cache that only it goes on with
        return memory, memory is not None
    if memory.tensors != tensors:
        return None, False
    return memory, memory.marks == _marks(layer)


def remember(
    layer: Any, adapter: str, tensors: object, groups: Tensor | None, length: int, complete: bool, waiting: Waiting
) -> None:
    """Keep the groups of all keys of a layer, which nobody else has touched since they were found; see `Memory`."""
    keys = getattr(layer, "keys", None)
    whole = isinstance(keys, Tensor) and keys.dim() == 4 and keys.shape[2] >= length
    memories = dict(getattr(layer, _NAME, {}))  # a copy: a copied layer may share it with this one
    marks = {} if torch.compiler.is_compiling() else _marks(layer)
    memories[adapter] = Memory(tensors, length, groups, marks, keys if whole else None, complete, waiting)
    setattr(layer, _NAME, memories)


def _marks(layer: Any) -> dict[str, tuple[Any, int]]:
    """What changes when somebody changes a layer: its tensors by identity and version, and its numbers."""
    return {
        name: (value, 0) if isinstance(value, int) else (_Same(value), version(value))
        for name, value in vars(layer).items()
        if isinstance(value, Tensor | int) or name.startswith("_quantized")
    }


@dataclass(eq=False, repr=False)
class _Same:
    """Equal if it is of the same object."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


def version(value: Any) -> int:
    """Of a tensor, which a write in place raises; 0 where nobody counts."""
    return 0 if not isinstance(value, Tensor) or value.is_inference() else value._version


def state_of(tensors: Iterable[Tensor]) -> tuple[tuple[int, int], ...]:
    """What is another one when somebody has changed tensors."""
    return tuple((tensor.data_ptr(), version(tensor)) for tensor in tensors)


def same_keys(old: Tensor, new: Tensor) -> Tensor:
    """Where keys ``(B', H_kv, S', D)`` were among old ones ``(B, H_kv, S, D)``: int64 ``(B', S')``, indices into the
    ``B * S`` old tokens; -1 for a key that was not among them."""
    if old.shape[1::2] != new.shape[1::2] or not old.shape[0] * old.shape[2]:
        return torch.full((new.shape[0], new.shape[2]), -1, device=new.device)
    known, asked = (hashes(keys.transpose(1, 2)) for keys in (old.to(new), new))  # a cache may have been cast, too
    return places(known.flatten(), asked.flatten()).view(asked.shape)


def places(known: Tensor, asked: Tensor) -> Tensor:
    """Where numbers ``(n,)`` are among known ones, of which there are some: int64 ``(n,)``; -1 for one that is not."""
    ordered, order = known.sort(stable=True)
    place = torch.searchsorted(ordered, asked).clamp(max=ordered.shape[0] - 1)
    return torch.where(ordered[place] == asked, order[place], -1)


def hashes(keys: Tensor) -> Tensor:
    """A number for each token by the bits of its keys ``(..., H_kv, D)``: int64 ``(...)``."""
    rows = keys.flatten(-2).contiguous().view(torch.uint8)
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % 8)).view(torch.int64)
    generator = torch.Generator().manual_seed(0)
    odd = torch.randint(-(2**62), 2**62, (rows.shape[-1],), generator=generator).to(rows.device) * 2 + 1
    mixed = (rows ^ (rows >> 29)) * odd
    return (mixed ^ (mixed >> 32)).sum(dim=-1)
