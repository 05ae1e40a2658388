"""The work that a call gives a device: of every launch its bytes and products, and the time that these would take.

Counted from shapes, as the kernels do it: `focus_hf.attention.kernels.triton_sizes` says how they cut their work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from focus_hf.attention.kernels.triton_sizes import keys_of_prompt_tile, num_splits, power_of_two, tokens_of_tile
from focus_hf.attention.on_device import FEW_QUERIES
from focus_hf.bench import Setting

from .devices import Device

#: Bands of distance.
BANDS = 6

#: How many times as many keys consecutive tokens read together as each of them, where each reads a tenth; by their
#: number. `python -m studies.tile_unions` measures it (SmolLM2, 8,192 tokens, 64 groups).
TOGETHER = {1: 1.0, 8: 2.11, 16: 2.65, 32: 3.26, 64: 3.83}

#: What our kernel of prompts reaches of the peak: 283 TFLOPS of 989 on an H200, with mask and gather.
KERNEL_RATE = 0.29

#: What second-level caches deliver, in times of the memory's bandwidth: 5.5 TB/s on an H100. Assumed of others.
CACHE_RATE = 1.6

#: What gathering rows of 256 bytes and more reaches of the memory's bandwidth: 2.4 of 4.8 TB/s on an H200.
GATHER_RATE = 0.5

#: What looking at a key's byte takes, in instructions of a processor and with its waiting (2.0 ms for the 16,384 tiles
#: of a prompt of 32k tokens on an H200; 60 are issued), and how many a processor issues in a second.
LOOK, ISSUED = 200, 128 * 1.7e9

#: Seconds of a launch of decoding at least, one load after the other: a third of our 14.8 microseconds on an H200.
STEPS = 4.9e-6

#: And what judging a cell of a query takes, in such instructions: 0.86 ms for 100 million of them on an H200.
JUDGE = 246


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
        least: seconds that it takes at least; ``None`` is the device's.
    """

    name: str
    bytes: float
    flops: float = 0.0
    cached: float = 0.0
    issued: float = 0.0
    rate: float = KERNEL_RATE
    memory: float | None = None
    least: float | None = None

    def seconds(self, device: Device) -> float:
        """On a device, at least: the longest of moving bytes and multiplying, and looking at keys before that."""
        moving = self.bytes / (device.bandwidth * (self.memory or device.memory))
        products = self.flops / (device.flops * self.rate)
        looking = self.issued / (device.processors * ISSUED)
        return max(
            moving,
            products + looking,
            self.cached / (device.bandwidth * CACHE_RATE) + looking,
            self.least or device.kernel,
        )


def dense_work(setting: Setting, batch: int, *, decode: bool, rate: float) -> list[Work]:
    """One call of dense attention, and for a token the merge of its splits."""
    size, dims = setting.torch_dtype.itemsize, 2 * setting.head_dim
    cache = batch * setting.length * setting.kv_heads * dims * size
    if decode:
        return [Work("dense", cache, least=STEPS), Work("merge", 0.0, least=STEPS)]
    pairs = batch * setting.heads * setting.length * (setting.length + 1) / 2
    return [Work("dense", cache * (1 + setting.heads / setting.kv_heads), 2.0 * dims * pairs, rate=rate)]


def routing_work(setting: Setting, batch: int, tokens: int) -> list[Work]:
    """Groups of new keys, and the cells that queries read: of few tokens by plain operations, else a launch each."""
    keys, queries = (batch * tokens * heads for heads in (setting.kv_heads, setting.heads))
    of_queries = queries * setting.head_dim * setting.torch_dtype.itemsize
    table = keys * setting.num_groups * BANDS
    if tokens > FEW_QUERIES:
        of_keys = keys * setting.head_dim * setting.torch_dtype.itemsize
        return [Work("groups of keys", of_keys + keys), Work("cells read", of_queries + table, issued=table * JUDGE)]
    plain = [Work("groups of keys", 4.0 * keys * max(setting.head_dim, setting.num_groups))] * 6
    return plain + [Work("cells read", 4.0 * table)] * 5


def decode_work(setting: Setting, batch: int, share: float) -> list[Work]:
    """A list of the keys that are read, the gathering of these, the merge."""
    rows, dims, size = batch * setting.kv_heads, 2 * setting.head_dim, setting.torch_dtype.itemsize
    keys = rows * setting.length * share
    partial = rows * num_splits(rows, setting.length) * setting.heads / setting.kv_heads * setting.head_dim * 4.0
    return [
        Work("list", rows * setting.length + 4.0 * keys, issued=rows * setting.length * LOOK, least=STEPS),
        Work("gather", 4.0 * keys + keys * dims * size + partial, memory=GATHER_RATE, least=STEPS),
        Work("merge", partial, least=STEPS),
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
