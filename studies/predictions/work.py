"""The work that a call gives a device: of every launch its bytes and products, and the time that these would take.

Counted from shapes, as the kernels do it: `focus_hf.attention.kernels.triton_sizes` says how they cut their work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from focus_hf.attention.kernels.triton_sizes import keys_of_prompt_tile, num_splits, power_of_two, tokens_of_tile
from focus_hf.bench import Setting

from .devices import Device

#: Bands of distance.
BANDS = 6

#: How many times as many keys consecutive tokens read together as each of them, where each reads a tenth; by their
#: number. `python -m studies.tile_unions` measures it (SmolLM2, 8,192 tokens, 64 groups).
TOGETHER = {1: 1.0, 8: 2.11, 16: 2.65, 32: 3.26, 64: 3.83}

#: What a Triton attention kernel on Hopper's own products reaches of the peak: 477 TFLOPS of 989 for heads of 128 at
#: 16k tokens (pytorch/benchmark pull request 2391, where FlashAttention 3 has 621), a tenth off for mask and gather.
KERNEL_RATE = 0.43

#: What second-level caches deliver, in times of the memory's bandwidth: 5.5 TB/s on an H100. Assumed of others.
CACHE_RATE = 1.6

#: What gathering rows of 256 bytes and more reaches of the memory's bandwidth: assumed.
GATHER_RATE = 0.7

#: Instructions for each key that a tile of a prompt looks at, as compiled for sm_90 and for keys in the last band, and
#: how many a processor issues in a second.
LOOK, ISSUED = 60, 128 * 1.7e9


@dataclass(frozen=True)
class Work:
    """One launch.

    Args:
        name: of it.
        bytes: that it reads and writes in memory.
        flops: of its matrix products, by whole tiles.
        cached: bytes that it reads from the second-level cache.
        issued: instructions that it issues before its products.
        rate: share of the peak that its products reach.
        memory: share of the bandwidth; ``None`` is the device's.
    """

    name: str
    bytes: float
    flops: float = 0.0
    cached: float = 0.0
    issued: float = 0.0
    rate: float = KERNEL_RATE
    memory: float | None = None

    def seconds(self, device: Device) -> float:
        """On a device, at least: the longest of moving bytes and multiplying, and looking at keys before that."""
        moving = self.bytes / (device.bandwidth * (self.memory or device.memory))
        products = self.flops / (device.flops * self.rate)
        looking = self.issued / (device.processors * ISSUED)
        return max(moving, products + looking, self.cached / (device.bandwidth * CACHE_RATE) + looking, device.kernel)


def dense_work(setting: Setting, batch: int, *, decode: bool, rate: float) -> list[Work]:
    """One call of dense attention, and for a token the merge of its splits."""
    size, dims = setting.torch_dtype.itemsize, 2 * setting.head_dim
    cache = batch * setting.length * setting.kv_heads * dims * size
    if decode:
        return [Work("dense", cache), Work("merge", 0.0)]
    pairs = batch * setting.heads * setting.length * (setting.length + 1) / 2
    return [Work("dense", cache * (1 + setting.heads / setting.kv_heads), 2.0 * dims * pairs, rate=rate)]


def routing_work(setting: Setting, batch: int, tokens: int) -> list[Work]:
    """Groups of new keys, by the six plain operations of `routing.cells.key_groups`; the cells that queries read."""
    keys, queries = (batch * tokens * heads for heads in (setting.kv_heads, setting.heads))
    size, scores = setting.torch_dtype.itemsize, 4.0 * keys * setting.num_groups
    wide = 4.0 * keys * setting.head_dim  # keys in float32
    steps = (wide * (1 + size / 4), wide * 1.25, wide / 4 + scores, 2 * scores, scores + 8.0 * keys, 9.0 * keys)
    table = keys * setting.num_groups * BANDS
    return [
        *(Work("groups of keys", step) for step in steps),
        Work("cells read", queries * setting.head_dim * size + table),
    ]


def decode_work(setting: Setting, batch: int, share: float) -> list[Work]:
    """A list of the keys that are read, the gathering of these, the merge."""
    rows, dims, size = batch * setting.kv_heads, 2 * setting.head_dim, setting.torch_dtype.itemsize
    keys = rows * setting.length * share
    partial = rows * num_splits(rows, setting.length) * setting.heads / setting.kv_heads * setting.head_dim * 4.0
    return [
        Work("list", rows * setting.length + 4.0 * keys),
        Work("gather", 4.0 * keys + keys * dims * size + partial, memory=GATHER_RATE),
        Work("merge", partial),
    ]


def prompt_work(setting: Setting, batch: int, share: float) -> list[Work]:
    """One launch: what the tokens of a tile read together, in whole tiles of keys."""
    each, size, dims = setting.heads // setting.kv_heads, setting.torch_dtype.itemsize, 2 * setting.head_dim
    tokens = tokens_of_tile(each)
    tiles = batch * setting.kv_heads * math.ceil(setting.length / tokens)
    looked = (setting.length + tokens) / 2  # keys before the last token of a tile, on average
    read = min(looked, looked * share * together(tokens))
    read += 0.5 * keys_of_prompt_tile(setting.head_dim, size) * math.ceil(looked / 4096)
    rows = tokens * power_of_two(each)
    own = batch * setting.length * (setting.heads + setting.kv_heads) * dims * size
    table = batch * setting.length * setting.kv_heads * setting.num_groups * BANDS
    flops, cached = 2.0 * dims * rows * tiles * read, tiles * read * dims * size
    return [Work("prompt", own + table, flops, cached, issued=tiles * looked * LOOK)]


def together(tokens: int) -> float:
    """Of `TOGETHER`, between its numbers too: straight by the logarithm."""
    low = max(number for number in TOGETHER if number <= tokens)
    high = min((number for number in TOGETHER if number >= tokens), default=low)
    if low == high:
        return TOGETHER[low]
    at = math.log(tokens / low) / math.log(high / low)
    return TOGETHER[low] + at * (TOGETHER[high] - TOGETHER[low])
