"""Continuous batching's pages carry group memberships: a token keeps the groups that it had when it was cached.

Memberships stand in tables beside the pages, one for each layer, addressed by the same ``write_index`` and
``read_index`` as the keys. They are not inside the pages, because pages are laid out from the model's configuration
before anybody knows which adapter there will be and how many groups it has. Whatever happens to whole blocks goes
through the allocator, so on first use it becomes a subclass of its own class that lets the tables follow: copies for
forks, requests that are put aside to the CPU and come back, and blocks that requests share because they begin alike.
The latter are found by a hash of their tokens: here of the adapter and its settings, too.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching import PagedAttentionCache

from .layer import FocusLayer


def find_pages(kwargs: dict[str, Any]) -> PagedAttentionCache | None:
    """The paged cache among an attention module's arguments, in continuous batching."""
    cache = kwargs.get("cache")
    return cache if isinstance(cache, PagedAttentionCache) else None


def pages_of(cache: PagedAttentionCache, router: FocusLayer, *, is_empty: bool) -> Any:
    """The allocator of a layer's pages, which now remembers memberships.

    Args:
        cache: of all layers.
        router: of the layer that is called.
        is_empty: no token of the call looks back at an earlier call's.

    Raises:
        ValueError: the cache was filled before the adapter was loaded.
    """
    allocator: Any = cache.layer_to_allocator[router.layer_idx]
    if not hasattr(allocator, "memberships"):
        if not is_empty:
            raise ValueError(
                "This paged cache holds tokens from before the Focus adapter was loaded. Start a new one: "
                "model.destroy_cached_continuous_batching_manager()."
            )
        allocator.__class__ = _with_memberships(allocator.__class__)
        allocator.memberships, allocator.routers, allocator.salts, allocator.aside = {}, {}, {}, {}
    known = allocator.routers.get(router.layer_idx)
    if known is None or known() is not router:  # an adapter was unloaded, and another one loaded
        allocator.routers[router.layer_idx] = weakref.ref(router)
        allocator.memberships.pop(router.layer_idx, None)
    return allocator


@dataclass
class _Aside:
    """Memberships of a request that was put aside, by layer, and whether the scheduler still has to let it go."""

    by_layer: dict[int, Tensor]
    leaving: bool = True


def _settings(routers: list[FocusLayer]) -> bytes:
    """What the keys of the next token depend on, besides the tokens: which adapters are active, and how they route."""
    configs: dict[int, str] = {}
    layers: list[object] = []
    for router in routers:
        for config in router.configs.values():
            configs[id(config)] = repr(config)
        own = [p for name in router.configs for p in router.tensors_of(name)]
        tensors = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in own]
        layers.append((router.active_adapters, router.disable_adapters, router.mode, router.window, tensors))
    return repr((layers, list(configs.values()))).encode()


@functools.cache
def _with_memberships(allocator_class: Any) -> type:
    """A subclass of an allocator's own class whose pages have memberships beside them."""

    class AllocatorWithGroups(allocator_class):
        #: By layer: the adapter that they are of, and bool ``(blocks * tokens_per_page, columns)``.
        memberships: dict[int, tuple[object, Tensor]]
        routers: dict[int, weakref.ref[FocusLayer]]
        #: By request: the settings that its first token was cached under.
        salts: dict[str, int]
        aside: dict[str, _Aside]

        # -- tables ----------------------------------------------------------------------------------------------

        def places(self, index: Tensor) -> Tensor:
            """Rows of the tables for rows of the cache, as in ``write_index`` and ``read_index``."""
            stride, page = self.block_physical_stride, self.tokens_per_page
            return index.div(stride, rounding_mode="floor") * page + index % stride

        def remember(self, layer: int, places: Tensor, new: Tensor, owner: object) -> None:
            """Store memberships, bool ``(T, columns)``; tokens of another adapter become unknown: in all groups."""
            found = self.memberships.get(layer)
            if found is None or found[0] != owner or found[1].shape[1] != new.shape[1]:
                blocks = self._copy_view.shape[0]
                table = new.new_ones(blocks * self.tokens_per_page, new.shape[1])
                found = self.memberships[layer] = (owner, table)
            found[1][places] = new

        def recall(self, layer: int, places: Tensor) -> Tensor:
            """Memberships of tokens: bool ``(..., columns)``."""
            return self.memberships[layer][1][places]

        def forget(self, layer: int, places: Tensor) -> None:
            """These tokens are cached without groups: unknown."""
            if layer in self.memberships:
                self.memberships[layer][1][places] = True

        def _by_block(self, table: Tensor) -> Tensor:
            return table.view(-1, self.tokens_per_page, table.shape[1])

        # -- whole blocks ----------------------------------------------------------------------------------------

        def copy_blocks(self, source_block_ids: list[int], dest_block_ids: list[int]) -> None:
            super().copy_blocks(source_block_ids, dest_block_ids)
            for _, table in self.memberships.values():
                blocks = self._by_block(table)
                blocks[dest_block_ids] = blocks[source_block_ids]

        def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
            if no_cache and request_id in self.block_table:  # its pages go to the CPU, or are computed anew
                self._wait()
                blocks = self.block_table[request_id]
                saved = {layer: self._by_block(table)[blocks] for layer, (_, table) in self.memberships.items()}
                self.aside[request_id] = _Aside(saved)
            elif request_id in self.aside and self.aside[request_id].leaving:
                self.aside[request_id].leaving = False
            else:  # it is over, or was cancelled while it waited
                self.aside.pop(request_id, None)
                self.salts.pop(request_id, None)
            super().free_blocks(request_id, no_cache)

        def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
            returns = past_length > 0 and request_id not in self.block_table
            super().allocate_cache_to_request(request_id, past_length, query_length)
            aside = self.aside.pop(request_id, None)
            if aside is not None and returns:
                self._wait()
                for layer, saved in aside.by_layer.items():
                    if layer in self.memberships and saved.shape[-1] == self.memberships[layer][1].shape[-1]:
                        blocks = self.block_table[request_id][: saved.shape[0]]
                        self._by_block(self.memberships[layer][1])[blocks] = saved[: len(blocks)]
            if past_length == 0 or request_id not in self.salts:
                self.salts[request_id] = self.salt()

        def _wait(self) -> None:
            """A call that is still running on the device may write to the tables."""
            if self.cache_tensor.device.type != "cpu":
                torch.accelerator.synchronize(self.cache_tensor.device)

        def free_all_requests(self) -> None:
            super().free_all_requests()
            self.aside.clear()
            self.salts.clear()

        # -- blocks that requests share --------------------------------------------------------------------------

        def salt(self) -> int:
            """A number for the adapter and its settings as they are now, within the bits that tokens leave free."""
            routers = [router for found in self.routers.values() if (router := found()) is not None]
            digest = hashlib.blake2b(_settings(routers), digest_size=4).digest()
            return int.from_bytes(digest, "little") & 0x7FFFFFFF

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

    AllocatorWithGroups.__name__ = f"{allocator_class.__name__}WithGroups"
    AllocatorWithGroups.__qualname__ = AllocatorWithGroups.__name__
    return AllocatorWithGroups
