"""Merging attention over disjoint sets of keys by their logsumexps."""

from __future__ import annotations

import torch
from torch import Tensor


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
