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
from ..remembered import hashes, state_of

#: Calls whose overwritten rows are kept.
_ASIDE = 4096


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
    allocator.routers[router.layer_idx] = weakref.ref(router)
    return allocator


def group_table(pages: Any, layer: int) -> GroupTable:
    """Groups of the keys that a layer has in its pages."""
    if layer not in pages.tables:
        pages.tables[layer] = GroupTable(pages._kv_token_views[layer][0].shape[0])
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
    """Groups of the keys in the rows of an engine's memory: a cache of a function, by what the rows hold.

    Engines copy, move, share and overwrite rows as they like. A row's groups hold as long as the key in it is the one
    that they were found for; a key that has moved is found again by its bits.

    Args:
        rows: how many.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._owner: object = None
        self._hashes: Tensor | None = None
        self._groups: Tensor | None = None
        #: What was overwritten: an engine may have put it aside, and bring it back.
        self._aside: list[tuple[Tensor, Tensor]] = []

    def put(self, rows: Tensor, keys: Tensor, groups: Tensor, owner: object) -> None:
        """Groups ``(n, ...)`` of keys ``(n, H_kv, D)``, as the engine keeps them, that have just been written to rows
        ``(n,)``; ``owner``: whose groups they are."""
        if self._owner != owner or self._groups is None or self._groups.shape[1:] != groups.shape[1:]:
            self._owner = owner
            self._hashes = torch.zeros(self._rows, dtype=torch.int64, device=keys.device)
            self._groups = groups.new_full((self._rows, *groups.shape[1:]), -1)
            self._aside = []
        assert self._hashes is not None
        before = self._hashes[rows]
        self._aside = [*self._aside[-_ASIDE:], (before, self._groups[rows])]
        self._hashes[rows], self._groups[rows] = hashes(keys.transpose(0, 1)[None])[0], groups

    def get(self, rows: Tensor, keys: Tensor, owner: object) -> Tensor | None:
        """Groups of the keys in rows now, see `put`: ``(n, ...)``, -1 where nobody knows; ``None``: of nobody's."""
        if self._owner != owner or self._groups is None or self._hashes is None:
            return None
        asked = hashes(keys.transpose(0, 1)[None])[0]
        groups, moved = self._groups[rows], self._hashes[rows] != asked
        if bool(moved.any()):
            everywhere = torch.cat([self._hashes, *(seen for seen, _ in self._aside)])
            of_them = torch.cat([self._groups, *(kept for _, kept in self._aside)])
            known, order = everywhere.sort()
            place = torch.searchsorted(known, asked[moved]).clamp(max=known.shape[0] - 1)
            found = of_them[order[place]]
            missing = known[place] != asked[moved]
            groups[moved] = torch.where(missing.view(-1, *(1,) * (found.dim() - 1)), -1, found)
        return groups
