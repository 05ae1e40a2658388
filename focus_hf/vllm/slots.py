"""Slots of vLLM's KV cache: where a request's tokens stand, and a table of groups beside them.

A slot is ``block * block_size + offset``. vLLM writes each new token's keys to the slot that it gives the token, and a
block is shared by requests only while it holds these very tokens. So what is remembered under the same slots, in the
same call, stays right through chunked prefill, prefix caching and preemption.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
    device = block_table.device
    counts = torch.tensor(lengths, dtype=torch.long, device=device)
    request = torch.repeat_interleave(torch.arange(len(lengths), device=device), counts)
    starts = counts.cumsum(0) - counts
    position = torch.arange(request.shape[0], device=device) - starts[request]
    blocks = block_table[request, position.div(block_size, rounding_mode="floor")].long()
    return blocks * block_size + position % block_size


def rows_of(kv_cache: Tensor) -> Tensor:
    """A layer's cache by slot.

    Args:
        kv_cache: ``(blocks, H_kv, block_size, D + D_v)``, in memory block after block and token after token.

    Returns:
        ``(slots, H_kv, D + D_v)``, a view.
    """
    by_token = kv_cache.transpose(1, 2)
    return by_token.view(-1, *by_token.shape[2:])


class SlotTable:
    """Of one layer: what is remembered of the token in each slot."""

    def __init__(self) -> None:
        self._table: Tensor | None = None

    def write(self, slots: Tensor, groups: Tensor, total: int) -> None:
        """Remember new tokens.

        Args:
            slots: integers ``(T,)``.
            groups: integers ``(T, columns)``.
            total: slots of the whole cache.
        """
        if self._table is None or self._table.shape[0] != total:
            self._table = groups.new_zeros(total, groups.shape[1])
        self._table[slots] = groups

    def read(self, slots: Tensor) -> Tensor:
        """``(..., columns)`` of the tokens in ``slots``, integers ``(...)``."""
        assert self._table is not None
        return self._table[slots]
