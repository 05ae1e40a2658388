"""The KV cache carries group memberships: a token keeps the groups it had when it was cached.

A long cache layer is moreover stored *by groups* (`attention.store`), so that decoding reads only what a token
attends to. Whatever needs its keys in their order (another adapter, a beam search that the layer does not know how to
follow, the base model's own attention) finds them as ever: the layer then goes back to plain storage.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache

from ..attention import (
    GroupedStore,
    HeadClass,
    TokensGone,
    columns_by_head,
    memberships_of,
    memberships_of_columns,
)
from .last_tokens import LastTokens
from .room import Room, can_share


def find_cache(values: tuple[Any, ...]) -> Cache | None:
    """The self-attention cache among a module's arguments (models name the argument differently)."""
    for value in values:
        if isinstance(value, EncoderDecoderCache):
            return value.self_attention_cache
        if isinstance(value, Cache):
            return value
    return None


def cache_layer(cache: Cache, layer_idx: int) -> Any:
    """The cache's layer, created if the cache grows lazily; it now remembers memberships."""
    while len(cache.layers) <= layer_idx and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    layer: Any = cache.layers[layer_idx]
    if not hasattr(layer, "known_memberships"):
        layer.__class__ = _with_memberships(layer.__class__)
        layer.device_tokens = getattr(cache, "device_tokens", None)  # of a `FocusCache`
    return layer


def tokens_seen(layer: Any) -> int:
    """Tokens that went through this cache layer so far, whether or not it still holds them all."""
    return int(layer.get_seq_length())


@functools.cache
def _with_memberships(layer_class: type) -> type:
    """A subclass of a cache layer's own class that holds memberships and lets them follow its tokens.

    Memberships are ``K`` booleans a token beside ``2 * H_kv * D`` numbers of keys and values, so they stay where
    they are when a cache is offloaded, and cover all tokens seen even where a sliding layer drops old keys.
    """

    class CacheLayerWithGroups(layer_class):
        _layer_type = None  # or transformers would take it for the default layer of that type
        #: Perhaps of some tokens only, where there are numbers of all: see `group_memberships`.
        known_memberships: Tensor | None = None
        #: See `group_numbers`: without those of the `last_tokens`.
        found_numbers: Tensor | None = None
        #: Where single tokens came one by one.
        last_tokens: LastTokens | None = None
        group_owner: object = None
        #: Every token is in exactly this many groups, if that is known without looking.
        groups_each: int | None = None
        #: Tokens of lists that the device has room for in each row, when the store is to be in host memory.
        device_tokens: int | None = None
        #: While the layer is stored by groups; its own tensors are then empty.
        store: GroupedStore | None = None
        #: Outside of a store it keeps all keys in their order, and nothing else.
        keeps_all = layer_class is DynamicLayer
        num_stored = 0
        #: Nothing in the store is padding.
        store_unpadded = False
        #: Of the heads in the store, where they do not all attend alike, and how many columns their groups have.
        store_classes: Sequence[HeadClass] | None = None
        store_columns = 0
        #: Plain for one call: heads have let tokens go.
        must_store = False
        #: Something needed the keys in their order; sorting them anew each time would cost more than it saves.
        stays_plain = False
        #: The next `update` is that of a routed call, which reads the store itself.
        routed = False
        #: Of the tensors that grow with every token, by name.
        rooms: dict[str, Room] | None = None

        @property
        def group_numbers(self) -> Tensor | None:
            """int64 ``(B, P * k, S)``, where single tokens go on by numbers."""
            if self.last_tokens is not None:
                self.group_numbers = self.last_tokens.find()
            return self.found_numbers

        @group_numbers.setter
        def group_numbers(self, numbers: Tensor | None) -> None:
            self.found_numbers, self.last_tokens = numbers, None

        @property
        def group_memberships(self) -> Tensor | None:
            """bool ``(B, S, K)``."""
            known, numbers = self.known_memberships, self.group_numbers
            if known is not None and numbers is not None and (there := known.shape[1]) < numbers.shape[-1]:
                each = int(self.groups_each or 1)
                width = known.shape[-1] * each // numbers.shape[1]
                known = torch.cat([known, memberships_of(numbers[..., there:], width, each)], dim=1)
                self.known_memberships = known
            return known

        @group_memberships.setter
        def group_memberships(self, memberships: Tensor | None) -> None:
            self.known_memberships, self.group_numbers = memberships, None

        # -- storage by groups -----------------------------------------------------------------------------------

        def start_store(self, store: GroupedStore, unpadded: bool, classes: Sequence[HeadClass] | None = None) -> None:
            self.num_stored, self.store_unpadded = self.get_seq_length(), unpadded
            known = self.group_memberships
            self.store_classes, self.store_columns = classes, 0 if known is None else known.shape[-1]
            self.store, self.group_memberships = store, None
            self.must_store = False
            self.__dict__["keys"] = self.__dict__["values"] = self.rooms = None

        def restore(self, for_good: bool = True) -> None:
            """Back to plain storage, with every token in its column.

            Args:
                for_good: something else needs it. If not, it is stored by groups again after this call, and heads that
                    have let tokens go do not look at these.

            Raises:
                TokensGone: something else would find tokens missing.
            """
            store = self.store
            if store is None:
                return
            if for_good and store.tokens_gone:
                raise TokensGone(
                    "This cache keeps of some heads their window only, and what continues it needs more: another "
                    "adapter, budget or mode, the base model, or a mask that changed. Start from an empty cache, or "
                    'let it keep everything, from the start, with focus_hf.set_routing(model, path="masked").'
                )
            keys, values, memberships = store.restore()
            self.groups_each = store.groups_each
            if self.store_classes is not None:
                keys, values = (x[:, 0].unflatten(0, (-1, len(store.heads))) for x in (keys, values))
                memberships = memberships_of_columns(memberships, self.store_classes, self.store_columns)
                if len(columns_by_head(self.store_classes)) * store.num_groups < self.store_columns:
                    self.groups_each = None
            self.group_memberships, self.must_store = memberships, store.tokens_gone
            self.store, self.stays_plain = None, for_good
            self.__dict__["keys"], self.__dict__["values"] = keys, values

        @property
        def keys(self) -> Any:
            self.restore()
            return self.__dict__.get("keys")

        @keys.setter
        def keys(self, tensor: Any) -> None:
            self.restore()
            self.__dict__["keys"] = tensor

        @property
        def values(self) -> Any:
            self.restore()
            return self.__dict__.get("values")

        @values.setter
        def values(self, tensor: Any) -> None:
            self.restore()
            self.__dict__["values"] = tensor

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            routed, self.routed = self.routed, False
            if self.store is not None and routed:
                return key_states, value_states
            if layer_class is not DynamicLayer or self.store is not None or not self.get_seq_length():
                return super().update(key_states, value_states, *args, **kwargs)
            own = self.__dict__
            own["keys"] = keys = self.join("keys", own["keys"], key_states, dim=-2)
            own["values"] = values = self.join("values", own["values"], value_states, dim=-2)
            return keys, values

        def join(self, name: str, held: Tensor, new: Tensor, dim: int) -> Tensor:
            """``torch.cat([held, new], dim)``, which leaves what is held where it is."""
            if not held.shape[dim] or not can_share(held, new):
                return torch.cat([held, new], dim=dim)
            self.rooms = {} if self.rooms is None else self.rooms
            return self.rooms.setdefault(name, Room()).append(held, new, dim)

        def offload(self) -> None:
            self.rooms = None
            super().offload()

        def get_seq_length(self) -> int:
            if self.store is not None:
                return self.num_stored
            if layer_class is not DynamicLayer:
                return super().get_seq_length()
            keys = self.__dict__.get("keys")  # asked several times in every layer at every token
            return 0 if keys is None or not keys.numel() else keys.shape[-2]

        def crop(self, tokens_to_remove: int) -> None:
            if self.store is None or tokens_to_remove >= 0:
                super().crop(tokens_to_remove)
                self._forget_groups(self.get_seq_length())
                return
            self.num_stored += tokens_to_remove
            self.store.crop(-tokens_to_remove)

        # -- memberships -----------------------------------------------------------------------------------------

        def _forget_groups(self, seen: int) -> None:
            """Of tokens that are no more: others may come in their places, of which nobody says in which groups."""
            known, numbers = self.known_memberships, self.group_numbers
            if known is not None and known.shape[1] > seen:
                self.known_memberships = known[:, :seen]
            if numbers is not None and numbers.shape[-1] > seen:
                self.group_numbers = numbers[..., :seen]

        def _update_memberships(self, change: Callable[[Tensor], Tensor]) -> None:
            numbers = self.group_numbers
            if self.known_memberships is not None:
                self.group_memberships = change(self.known_memberships)
            if numbers is not None:
                self.group_numbers = change(numbers)

        def _rows(self) -> Tensor:
            assert self.store is not None
            return torch.arange(self.store.columns.shape[0], device=self.store.device)

        def reset(self) -> None:
            self.store, self.stays_plain, self.must_store, self.rooms = None, False, False, None
            super().reset()
            self.group_memberships = None

        def reorder_cache(self, beam_idx: Tensor) -> None:
            if self.store is not None:
                self.store.select(beam_idx)
                return
            super().reorder_cache(beam_idx)
            self._update_memberships(lambda known: known.index_select(0, beam_idx.to(known.device)))

        def batch_repeat_interleave(self, repeats: int) -> None:
            if self.store is not None:
                self.store.select(self._rows().repeat_interleave(repeats))
                return
            super().batch_repeat_interleave(repeats)
            self._update_memberships(lambda known: known.repeat_interleave(repeats, dim=0))

        def batch_select_indices(self, indices: Tensor) -> None:
            if self.store is not None:
                rows = self._rows()
                self.store.select(rows[indices.to(rows.device)])
                return
            super().batch_select_indices(indices)
            self._update_memberships(lambda known: known[indices.to(known.device)])

    CacheLayerWithGroups.__name__ = f"{layer_class.__name__}WithGroups"
    CacheLayerWithGroups.__qualname__ = CacheLayerWithGroups.__name__
    return CacheLayerWithGroups
