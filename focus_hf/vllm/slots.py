"""Slots of vLLM's KV cache: where a request's tokens stand, and their groups beside them, in the same pages.

A slot is ``block * block_size + offset``. vLLM writes each new token's keys to the slot that it gives the token, and a
block is shared by requests only while it holds these very tokens. A page is made longer by the groups of its tokens
(`padded_page`), so they are counted into the memory that vLLM plans for, and are wherever their keys are: through
chunked prefill, prefix caching and preemption.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: A page's length is a multiple of so many bytes, as kernels load them.
ALIGNMENT = 16


def key_slots(block_table: Tensor, lengths: Sequence[int], block_size: int) -> Tensor:
    """The slots of all tokens of several requests, one request after the other.

    Args:
        block_table: integers ``(R, blocks)``, the blocks of each request in order; what is beyond its length means
            nothing.
        lengths: tokens of each request, the new ones included.
        block_size: tokens of a block.

    Returns:
        int64, ``(sum of lengths,)``.
    """
    counts = torch.tensor(lengths, dtype=torch.long)
    request = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    position = torch.arange(request.shape[0]) - (counts.cumsum(0) - counts)[request]
    request, position = torch.stack([request, position]).to(block_table.device)
    blocks = block_table[request, position.div(block_size, rounding_mode="floor")].long()
    return blocks * block_size + position % block_size


def padded_page(page: int, block_size: int, group_bytes: int) -> int:
    """Bytes of a page with the groups of its tokens behind it.

    Args:
        page: bytes of its keys and values.
        block_size: tokens of a page.
        group_bytes: of one token, of all its heads.
    """
    return -(-(page + block_size * group_bytes) // ALIGNMENT) * ALIGNMENT


def groups_of(kv_cache: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """The groups behind the keys and values of each page (`padded_page`).

    Args:
        kv_cache: ``(blocks, H_kv, block_size, D + D_v)``, in memory token after token within a block.
        columns: groups of a token.
        dtype: of a group.

    Returns:
        ``(blocks, block_size, columns)`` of ``dtype``, a view.
    """
    blocks, heads, size, width = kv_cache.shape
    own = kv_cache.element_size()
    first, page, length = kv_cache.storage_offset() * own, kv_cache.stride(0) * own, heads * size * width * own
    assert page >= padded_page(length, size, columns * dtype.itemsize), "vLLM's pages have no room for groups"
    view = torch.empty(0, dtype=dtype, device=kv_cache.device)
    at, step = (first + length) // dtype.itemsize, page // dtype.itemsize
    return view.set_(kv_cache.untyped_storage(), at, (blocks, size, columns), (step, columns, 1))
