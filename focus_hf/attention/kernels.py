"""Attention calls that return their logsumexp, so that partial results can be merged exactly.

One backend so far: the flash kernel that every CPU build of PyTorch carries.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def cpu_flash_available(query: Tensor) -> bool:
    """Whether `flash_attention` can run on tensors like this one."""
    return query.device.type == "cpu" and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool = False, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """PyTorch's CPU flash kernel.

    Args:
        query: ``(N, H, Q, D)``, ``Q >= 1``: the kernel crashes the process on empty input.
        key: ``(N, H_kv, S, D)``, ``S >= 1``; ``H`` a multiple of ``H_kv``, heads are not copied.
        value: ``(N, H_kv, S, D_v)`` with ``D_v <= D``; the kernel wants equal sizes, so it is padded here.
        scale: factor on ``q . k``.
        causal: query ``m`` sees keys ``0 .. m`` (top-left aligned).
        bias: added to the scores, ``(N, 1, Q, S)``. Mask with a large finite number: a row that is ``-inf``
            throughout gets a logsumexp of 0 from this kernel, which would corrupt a merge.

    Returns:
        Output ``(N, H, Q, D_v)`` in the dtype of ``query`` and logsumexp ``(N, H, Q)``, at least float32.
    """
    value_dim = value.shape[-1]
    if value_dim < query.shape[-1]:
        value = F.pad(value, (0, query.shape[-1] - value_dim))
    output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=bias, scale=scale
    )
    return output[..., :value_dim], logsumexp


def merge(output_a: Tensor, lse_a: Tensor, output_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax attention over the union of two disjoint sets of keys, from the results over each.

    Args:
        output_a, output_b: ``(..., Q, D)``.
        lse_a, lse_b: ``(..., Q)``; ``-inf`` where a row has no keys in that part.

    Returns:
        Output ``(..., Q, D)`` and logsumexp ``(..., Q)``, in the dtype of the logsumexps.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    finite = lse.masked_fill(lse == float("-inf"), 0.0)
    weight_a, weight_b = (lse_a - finite).exp(), (lse_b - finite).exp()
    return output_a * weight_a[..., None] + output_b * weight_b[..., None], lse
