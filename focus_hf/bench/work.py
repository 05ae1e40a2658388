"""The work that a call gives a device: of every operation its bytes and products, and the time that these would take.

Real tensors or fake ones (`torch._subclasses.FakeTensorMode`): with fake ones, operations of any length and batch are
recorded in no time and memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .counting import FREE
from .devices import Device

#: How often a radix sort reads and writes what it sorts: 64-bit keys, eight bits at a time.
SORT_PASSES = 8

#: Queries and keys of one block of an attention kernel on CUDA.
BLOCK = 128

#: Keys of one block of PyTorch's CPU kernel.
_CPU_KEYS = 512


@dataclass(frozen=True)
class Work:
    """One operation.

    Args:
        name: of it.
        bytes: that it reads and writes.
        flops: of its matrix products; those of attention by whole blocks of its kernel.
        blocks: thread blocks that the products are spread over; 0 where that is not known.
    """

    name: str
    bytes: float
    flops: float = 0.0
    blocks: int = 0

    def seconds(self, device: Device) -> float:
        """On a device, at least: the longer of moving bytes and multiplying."""
        idle = 1.0
        if self.blocks:
            rounds = math.ceil(self.blocks / device.processors)
            idle = rounds * device.processors / self.blocks
        products = self.flops * idle / (device.flops * device.attention)
        return max(products, self.bytes / (device.bandwidth * device.memory), device.kernel)


class WorkRecorder(TorchDispatchMode):
    """Records operations while it is entered; those that launch nothing are left out.

    Attributes:
        works: in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.works: list[Work] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and name not in FREE and func.namespace != "prim":  # fake tensors ask for their device
            self.works.append(_work(name, args, kwargs or {}, result))
        return result


def _work(name: str, args: Any, kwargs: Any, result: Any) -> Work:
    tensors = {id(t): t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)}.values()
    moved = float(sum(_bytes(tensor) for tensor in tensors))
    if name in ("sort", "argsort"):
        moved *= SORT_PASSES
    if name == "index_select":  # of what is selected from, only that is read
        moved = 2.0 * _bytes(result) + _bytes(args[2])
    if name == "varlen_stand_in":
        return Work(name, moved, *_varlen(*args))
    if name.startswith("_scaled_dot_product"):
        return Work(name, moved, *_sdpa(args, kwargs))
    if name in ("mm", "bmm", "addmm", "baddbmm"):
        return Work(name, moved, 2.0 * result.numel() * args[-2].shape[-1])
    return Work(name, moved)


def _bytes(tensor: Tensor) -> int:
    """Of memory that is behind a tensor: what is expanded is there once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride) * tensor.element_size()


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_queries: Tensor, cu_keys: Tensor, *how: Any
) -> Iterator[Any]:
    """Products and blocks of ragged rows, taken to be of one length: groups are balanced."""
    rows, left = cu_queries.shape[0] - 1, how[3]
    queries, keys = (round(x.shape[0] / rows) for x in (query, key))
    pairs = pairs_in_blocks(queries, keys, None if left < 0 else left, causal=how[4] == 0)
    yield 2.0 * pairs * rows * query.shape[1] * (query.shape[2] + value.shape[2])
    yield rows * query.shape[1] * math.ceil(queries / BLOCK)


def _sdpa(args: Any, kwargs: Any) -> Iterator[Any]:
    query, key, value, *rest = args
    causal = kwargs.get("is_causal", rest[1] if len(rest) > 1 else False)
    queries, keys = query.shape[2], key.shape[2]
    on_cpu_kernel = query.device.type == "cpu" and not isinstance(query, torch._subclasses.FakeTensor)
    block = (cpu_block(queries), _CPU_KEYS) if on_cpu_kernel else (BLOCK, BLOCK)
    pairs = pairs_in_blocks(queries, keys, None, causal=bool(causal), block=block, top_left=True)
    heads = query.shape[0] * query.shape[1]
    yield 2.0 * pairs * heads * (query.shape[3] + value.shape[3])
    yield 0 if queries == 1 or on_cpu_kernel else heads * math.ceil(queries / BLOCK)  # one query: keys are split


def cpu_block(queries: int) -> int:
    """Queries of one block of PyTorch's CPU kernel, by their number."""
    return 256 if queries >= 768 else 64 if queries >= 192 else 32


def pairs_in_blocks(
    queries: int,
    keys: int,
    left: int | None,
    *,
    causal: bool,
    block: tuple[int, int] = (BLOCK, BLOCK),
    top_left: bool = False,
) -> int:
    """Pairs of the blocks that a kernel computes, of one row and head.

    Args:
        queries, keys: of the row.
        left: keys before a query's own that it sees; ``None`` for all.
        causal: no key after its own; ``False`` for all keys.
        block: queries and keys of a block.
        top_left: the first query is aligned with the first key, else the last with the last.
    """
    if not causal:
        return queries * keys
    height, width, offset, pairs = *block, 0 if top_left else keys - queries, 0
    for start in range(0, queries, height):
        stop = min(start + height, queries)
        first = 0 if left is None else max(0, offset + start - left) // width * width
        last = min(math.ceil((offset + stop) / width) * width, keys)
        pairs += (stop - start) * max(last - first, 0)
    return pairs
