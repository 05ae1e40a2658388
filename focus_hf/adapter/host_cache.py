"""A KV cache that is larger than the device: what is far away is kept in host memory, by groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicCache

from ..attention import PAGE, GroupedStore, TieredPool
from ..attention.slots import Slots


@dataclass(frozen=True)
class HostTier:
    """What the host tier of a cache holds, and what was asked of it so far.

    Args:
        layers: that have their far tokens on the host.
        other_layers: that hold something and have all of it on the device.
        hits, misses: pages that a query read and the device had, or that had to be fetched.
        waits: times that the host waited for the device, to learn what to fetch or to take in tokens.
        device_bytes: keys and values that these layers have on the device, recent ones included.
        host_bytes: likewise, in host memory.
    """

    layers: int = 0
    other_layers: int = 0
    hits: int = 0
    misses: int = 0
    waits: int = 0
    device_bytes: int = 0
    host_bytes: int = 0


class FocusCache(DynamicCache):
    """A dynamic cache with a host tier: of far tokens the device keeps those that were read last.

    As soon as a layer has more tokens than the device is to keep, it is stored by groups: all of its pages in host
    memory (pinned, for a GPU), and on the device the recent tokens and a fixed number of pages, least recently used
    out. Heads that route for themselves have pages of their own. Layers that do not attend by groups, and those with
    a head that attends to everything, stay on the device (see `host_tier`).

    Args:
        config: of the model, ``model.config``.
        device_tokens: far tokens of each sequence that every layer keeps on the device, at least 64; of each head,
            where these have pages of their own. Fewer than one step reads give the same output in several rounds.

    Raises:
        ValueError: room for less than a page.

    Example::

        past = focus_hf.FocusCache(model.config, device_tokens=4096)
        model.generate(**inputs, past_key_values=past)
        print(past.host_tier)
    """

    def __init__(self, config: PreTrainedConfig, device_tokens: int) -> None:
        if device_tokens < PAGE:
            raise ValueError(
                f"device_tokens is {device_tokens}, but tokens move in pages of {PAGE}: give at least {PAGE}, or use "
                "DynamicCache, which keeps everything on the device."
            )
        super().__init__(config=config)
        self.device_tokens = device_tokens

    @property
    def host_tier(self) -> HostTier:
        """What is where, and how often it had to be fetched."""
        held = [layer for layer in self.layers if isinstance(layer, CacheLayerMixin) and layer.get_seq_length()]
        tiered = [pair for layer in held if (pair := _in_two_tiers(layer)) is not None]
        pools = [pool for _, pool in tiered]
        return HostTier(
            len(pools),
            len(held) - len(pools),
            sum(pool.books.hits for pool in pools),
            sum(pool.books.misses for pool in pools),
            sum(pool.waits for pool in pools),
            sum(slots.keys.nbytes + slots.values.nbytes for pair in tiered for slots in pair),
            sum(pool.host_bytes() for pool in pools),
        )


def _in_two_tiers(layer: Any) -> tuple[Slots, TieredPool] | None:
    """The recent tokens and the lists of a layer that has its lists in host memory."""
    store: GroupedStore | None = getattr(layer, "store", None)
    return None if store is None or not isinstance(store.pool, TieredPool) else (store.recent, store.pool)
