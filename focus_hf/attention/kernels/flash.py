"""Flash attention on CUDA: PyTorch's own.

It takes ragged rows by their offsets, in one call, and is FlashAttention 3 or 4 where these are activated in PyTorch's
registry (``torch.nn.attention.activate_flash_attention_impl``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Call, Gradients, Kernel, Result, pad_heads

#: Where PyTorch's operations are.
ATEN = torch.ops.aten


class TorchFlash(Kernel):
    """``aten::_flash_attention_forward``, which ``torch.nn.attention.varlen`` is made of."""

    name = "torch-flash"

    def missing(self) -> str | None:
        if not torch.cuda.is_available():
            return "no CUDA device"
        return None if torch.backends.cuda.is_flash_attention_available() else "PyTorch was built without it"

    def unsupported(self, query: Tensor, value: Tensor) -> str | None:
        if query.device.type != "cuda":
            return "runs on CUDA only"
        if query.dtype not in (torch.float16, torch.bfloat16):
            return f"needs float16 or bfloat16, not {query.dtype}"
        if value.shape[-1] > query.shape[-1] or query.shape[-1] > 192:  # exclusions may lengthen heads by 64
            return "heads are too wide"
        return None

    def _forward(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Result:
        head_dim = -(-query.shape[-1] // 8) * 8
        q, k, v = (pad_heads(x, head_dim).contiguous() for x in (query, key, value))
        output, lse = self._varlen_forward(q, k, v, call, _window(call))
        return output[..., : value.shape[-1]], lse.T

    def _backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, call: Call
    ) -> Gradients:
        head_dim = -(-query.shape[-1] // 8) * 8
        g, q, k, v, o = (
            pad_heads(x.to(query.dtype), head_dim).contiguous() for x in (grad, query, key, value, output)
        )
        dq, dk, dv = self._varlen_backward(g, q, k, v, o, lse.float().T.contiguous(), call, _window(call))
        return dq[..., : query.shape[-1]], dk[..., : key.shape[-1]], dv[..., : value.shape[-1]]

    def _varlen_forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, window: tuple[int, int]) -> Result:
        """Output ``(Tq, H, D)`` and logsumexp ``(H, Tq)``."""
        arguments = (q, k, v, *_lengths(call), 0.0, window == (-1, 0), False)
        output, lse, *_ = ATEN._flash_attention_forward(
            *arguments, scale=call.scale, window_size_left=window[0], window_size_right=window[1]
        )
        return output, lse

    def _varlen_backward(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: Call, window: tuple[int, int]
    ) -> Gradients:
        """Gradients, from output ``(Tq, H, D)`` and logsumexp ``(H, Tq)`` of the whole attention."""
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        arguments = (g, q, k, v, o, lse, *_lengths(call), 0.0, window == (-1, 0), *no_dropout)
        return ATEN._flash_attention_backward(
            *arguments, scale=call.scale, window_size_left=window[0], window_size_right=window[1]
        )


def _lengths(call: Call) -> tuple[Tensor, Tensor, int, int]:
    """The rows as the interface takes them: offsets of queries and keys, longest row of each."""
    rows = call.rows
    return rows.cu_queries, rows.cu_keys, rows.longest_query, rows.longest_key


def _window(call: Call) -> tuple[int, int]:
    """Keys seen to the left and to the right; -1 for all."""
    if not call.causal:
        return -1, -1
    return (-1 if call.window is None else call.window), 0
