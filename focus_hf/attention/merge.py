"""Merging attention over disjoint sets of keys by their logsumexps."""

from __future__ import annotations

import torch
from torch import Tensor

from .rows import take


def merge(output_a: Tensor, lse_a: Tensor, output_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax attention over the union of two disjoint sets of keys, from the results over each.

    Args:
        output_a, output_b: ``(..., D)``.
        lse_a, lse_b: ``(...)``; ``-inf`` where there are no keys in that set.

    Returns:
        Output ``(..., D)`` and logsumexp ``(...)``, in the dtype of the logsumexps.
    """
    share_of_b = torch.sigmoid(lse_b - lse_a).nan_to_num(0.0)  # NaN: neither has keys
    output = torch.lerp(output_a.to(lse_a.dtype), output_b.to(lse_a.dtype), share_of_b[..., None])
    return output, torch.logaddexp(lse_a, lse_b)


class Accumulator:
    """Attention of ``T`` queries, merged from parts as they come.

    Args:
        num_tokens, num_heads, value_dim: shape of the output, ``(T, H, D_v)``.
        like: tensor whose device and dtype count; sums are kept in float32 at least.
        every_query: each query will get a part by `put`. Otherwise those without keep an output of 0 and a
            logsumexp of ``-inf``.
    """

    def __init__(self, num_tokens: int, num_heads: int, value_dim: int, like: Tensor, every_query: bool) -> None:
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.output = torch.empty(num_tokens, num_heads, value_dim, dtype=dtype, device=like.device)
        self.lse = torch.empty(num_tokens, num_heads, dtype=dtype, device=like.device)
        if not every_query:
            self.output.zero_()
            self.lse.fill_(float("-inf"))

    def put(self, index: Tensor | slice, output: Tensor, lse: Tensor) -> None:
        """The first part of these queries, ``output (n, H, D_v)`` and ``lse (n, H)``."""
        if isinstance(index, slice):
            self.output[index], self.lse[index] = output, lse
        else:
            self.output.index_copy_(0, index, output.to(self.output.dtype))
            self.lse.index_copy_(0, index, lse.to(self.lse.dtype))

    def add(self, index: Tensor | slice, output: Tensor, lse: Tensor) -> None:
        """A further part of these queries, each of them at most once."""
        current, current_lse = take(self.output, index), take(self.lse, index)
        current.lerp_(output.to(current.dtype), torch.sigmoid(lse - current_lse).nan_to_num_(0.0)[..., None])
        torch.logaddexp(current_lse, lse, out=current_lse)
        if not isinstance(index, slice):
            self.put(index, current, current_lse)

    def add_logits(self, logits: Tensor) -> None:
        """A key of value zero with the score ``logits (H,)``, for every query that has keys."""
        logits = logits.to(self.lse.dtype)
        self.output *= torch.sigmoid(self.lse - logits)[..., None]
        self.lse = torch.where(self.lse == float("-inf"), self.lse, torch.logaddexp(self.lse, logits))
