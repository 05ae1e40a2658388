"""Pages of transformers' continuous batching: whose they are, and the groups of the keys in them.

Blocks that requests share because they begin alike are shared only under the same adapter and settings: transformers
finds them by a hash of their tokens; here the hash is of the adapter and its settings, too.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching import PagedAttentionCache

from ..layer import FocusLayer
from ..remembered import hashes, places, state_of, version

#: Calls whose overwritten rows are kept.
_ASIDE = 4096

#: The hash of no key.
_NO_KEY = -(2**63)


def find_pages(kwargs: dict[str, Any]) -> PagedAttentionCache | None:
    """The paged cache among an attention module's arguments, in continuous batching."""
    cache = kwargs.get("cache")
    return cache if isinstance(cache, PagedAttentionCache) else None


def pages_of(cache: PagedAttentionCache, router: FocusLayer, *, is_empty: bool) -> Any:
    """The allocator of the pages of a router's layer, which now tells settings apart.

    Args:
        cache: of all layers.
        router: of the layer that is called.
        is_empty: no token of the call looks back at an earlier call's.

    Raises:
        ValueError: the cache was filled before the adapter was loaded.
    """
    allocator: Any = cache.layer_to_allocator[router.layer_idx]
    if not hasattr(allocator, "salts"):
        if not is_empty:
            raise ValueError(
                "This paged cache holds tokens from before the Focus adapter was loaded. Start a new one: "
                "model.destroy_cached_continuous_batching_manager()."
            )
        allocator.__class__ = _salted(allocator.__class__)
        allocator.routers, allocator.salts, allocator.tables = {}, {}, {}
        allocator.left, allocator.writers = 0, 0
    allocator.routers[router.layer_idx] = weakref.ref(router)
    return allocator


def write(pages: Any, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
    """Put keys and values ``(n, H_kv, D or D_v)`` in rows ``(n,)`` of a layer's pages, and see whether somebody else
    has written to the cache since the last time."""
    tensor = pages.cache_tensor
    if tensor.is_inference() or version(tensor) != pages.left:
        pages.writers += 1
    pages.update(keys, values, layer, rows[:0], rows)
    pages.left = version(tensor)


def group_table(pages: Any, layer: int) -> GroupTable:
    """Groups of the keys that a layer has in its pages."""
    if layer not in pages.tables:
        stride, size, found = pages.block_physical_stride, pages.tokens_per_page, []
        for view in pages._kv_token_views[layer]:
            count = (view.shape[0] - size) // stride + 1
            by_block = (view.stride(0) * stride, view.stride(1), view.stride(0), view.stride(2))
            found.append(view.as_strided((count, view.shape[1], size, view.shape[2]), by_block))
        keys, values = found
        pages.tables[layer] = GroupTable(keys, values, stride)
    return pages.tables[layer]


def _settings(routers: list[FocusLayer]) -> bytes:
    """What the keys of the next token depend on, besides the tokens: which adapters are active, and how they route."""
    configs = {id(config): repr(config) for router in routers for config in router.configs.values()}
    layers = []
    for router in routers:
        tensors = state_of(tensor for name in router.configs for tensor in router.tensors_of(name))
        layers.append((router.active_adapters, router.disable_adapters, router.mode, router.window, tensors))
    return repr((layers, list(configs.values()))).encode()


@functools.cache
def _salted(allocator_class: Any) -> type:
    """A subclass of an allocator's own class whose hashes are of the settings, too."""

    class SaltedAllocator(allocator_class):
        routers: dict[int, weakref.ref[FocusLayer]]
        #: By request: the settings that its first token was cached under.
        salts: dict[str, int]
        tables: dict[int, GroupTable]
        #: Version of the cache after our last write, and how often somebody else has written since the beginning.
        left: int | None
        writers: int

        def salt(self) -> int:
            """A number for the adapter and its settings as they are now, within the bits that tokens leave free."""
            routers = [router for found in self.routers.values() if (router := found()) is not None]
            digest = hashlib.blake2b(_settings(routers), digest_size=4).digest()
            return int.from_bytes(digest, "little") & 0x7FFFFFFF

        def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
            super().allocate_cache_to_request(request_id, past_length, query_length)
            if past_length == 0 or request_id not in self.salts:
                self.salts[request_id] = self.salt()

        def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
            if not no_cache:  # or it only waits
                self.salts.pop(request_id, None)
            super().free_blocks(request_id, no_cache)

        def free_all_requests(self) -> None:
            super().free_all_requests()
            self.salts.clear()

        def match_prefix_blocks(self, prompt_ids: list[int]) -> list[int]:
            salt = self.salt()
            return super().match_prefix_blocks([token ^ salt for token in prompt_ids])

        def acquire_prefix_blocks(self, request_id: str, prefix_len: int, block_ids: list[int]) -> None:
            super().acquire_prefix_blocks(request_id, prefix_len, block_ids)
            self.salts[request_id] = self.salt()

        def fork_blocks(self, source_request_id: str, dest_request_id: str, past_length: int) -> Any:
            self.salts[dest_request_id] = self.salts.get(source_request_id, self.salt())
            return super().fork_blocks(source_request_id, dest_request_id, past_length)

        def mark_complete_blocks(self, request_id: str, token_ids: list[int], new_new_blocks: int) -> None:
            salt = self.salt()
            if self.salts.setdefault(request_id, salt) == salt:  # else its tokens are of several settings
                super().mark_complete_blocks(request_id, [token ^ salt for token in token_ids], new_new_blocks)

    SaltedAllocator.__name__ = SaltedAllocator.__qualname__ = f"{allocator_class.__name__}Salted"
    return SaltedAllocator


class GroupTable:
    """Groups of the keys in an engine's pages: a cache of a function, by what the pages hold.

    Engines copy, move, share and overwrite blocks as they like. A key's groups hold as long as nobody but us has
    written to the cache; after that, as long as the key in the row is the one that they were found for. A key that has
    moved is found again by its bits.

    Args:
        keys, values: of a layer, ``(blocks, H_kv, block size, D or D_v)``.
        stride: rows from a block to the next one.
    """

    def __init__(self, keys: Tensor, values: Tensor, stride: int) -> None:
        self.keys, self.values, self._stride = keys, values, stride
        self._owner: object = None
        #: ``(blocks, block size, columns)``
        self._groups = torch.empty(0)
        #: ``(slots,)``: the hash of the key that the groups are of, and how many strangers had written when it was
        #: last seen there; -1 where nothing is known.
        self._hashes = self._seen = torch.empty(0)
        #: What was overwritten: an engine may have put it aside, and bring it back.
        self._aside: list[tuple[Tensor, Tensor]] = []

    def slots(self, rows: Tensor) -> Tensor:
        """Numbers of rows ``(n,)`` of the cache, without those of other layers."""
        return rows // self._stride * self.keys.shape[2] + rows % self._stride

    def stored(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values in slots ``(...)``: ``(..., H_kv, D or D_v)``."""
        block, place = slots // self.keys.shape[2], slots % self.keys.shape[2]
        return self.keys[block, :, place], self.values[block, :, place]

    def groups(self, slots: Tensor) -> Tensor:
        """Groups ``(..., columns)`` of the keys in slots ``(...)`` that are not among the `lost`."""
        return self._groups.flatten(0, 1)[slots]

    @property
    def blocks(self) -> Tensor:
        """All groups, ``(blocks, H_kv or 1, block size)``."""
        return self._groups.transpose(1, 2)

    def put(self, slots: Tensor, groups: Tensor, owner: object, writers: int) -> None:
        """Keep groups ``(n, columns)`` of the keys that are in slots ``(n,)``.

        Args:
            slots: see `slots`.
            groups: of the keys.
            owner: by what they were made; those of another one are forgotten.
            writers: how often a stranger has written to the cache.
        """
        shape = (self.keys.shape[0], self.keys.shape[2], groups.shape[1])
        if self._owner != owner or self._groups.shape != shape:
            self._owner, self._aside = owner, []
            self._groups = groups.new_zeros(shape)
            self._hashes = torch.full((shape[0] * shape[1],), _NO_KEY, device=groups.device)
            self._seen = torch.full_like(self._hashes, -1, dtype=torch.int32)
        self._aside = [*self._aside[-_ASIDE:], (self._hashes[slots], self.groups(slots))]
        self._groups.flatten(0, 1)[slots] = groups
        self._hashes[slots], self._seen[slots] = hashes(self.stored(slots)[0]), writers

    def lost(self, slots: Tensor, writers: int) -> Tensor:
        """Those of slots ``(n,)`` whose keys' groups the last owner does not know; see `put`."""
        stale = slots[self._seen[slots] != writers]
        if not len(stale):
            return stale
        asked = hashes(self.stored(stale)[0])
        moved = self._hashes[stale] != asked
        self._seen[stale[~moved]] = writers
        stale, asked = stale[moved], asked[moved]
        if not len(stale):
            return stale
        everywhere = torch.cat([self._hashes, *(seen for seen, _ in self._aside)])
        of_them = torch.cat([self._groups.flatten(0, 1), *(kept for _, kept in self._aside)])
        place = places(everywhere, asked)
        found = place >= 0
        if bool(found.any()):
            self.put(stale[found], of_them[place[found]], self._owner, writers)
        return stale[~found]
