"""Flash attention on CUDA: PyTorch's own, the ``flash-attn`` package, and the Hub's pre-built kernels.

All three take ragged rows by their offsets, in one call, and share an interface: FlashAttention-2's. PyTorch's own is
FlashAttention 3 or 4 where these are activated in its registry
(``torch.nn.attention.activate_flash_attention_impl``).
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from .base import Call, Gradients, Kernel, Result, pad_heads

#: The Hub's build of FlashAttention-2. Loading it runs code from there, so it is used only when named.
HUB_KERNEL = "kernels-community/flash-attn2"

_NOT_INSTALLED = "flash-attn is not installed (pip install 'focus-hf[flash]')"


class CudaFlash(Kernel):
    """What the three have in common: dtypes, head sizes, windows, the layout of logsumexps."""

    def missing(self) -> str | None:
        return None if torch.cuda.is_available() else "no CUDA device"

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

    @abstractmethod
    def _varlen_forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, window: tuple[int, int]) -> Result:
        """Output ``(Tq, H, D)`` and logsumexp ``(H, Tq)``."""

    @abstractmethod
    def _varlen_backward(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: Call, window: tuple[int, int]
    ) -> Gradients:
        """Gradients, from output ``(Tq, H, D)`` and logsumexp ``(H, Tq)`` of the whole attention."""


class TorchFlash(CudaFlash):
    """``aten::_flash_attention_forward``, which ``torch.nn.attention.varlen`` is made of."""

    name = "torch-flash"

    def missing(self) -> str | None:
        if (why := super().missing()) is not None:
            return why
        return None if torch.backends.cuda.is_flash_attention_available() else "PyTorch was built without it"

    def _interface(self) -> Any:
        return torch.ops.aten

    def _varlen_forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, window: tuple[int, int]) -> Result:
        arguments = (q, k, v, *_lengths(call), 0.0, window == (-1, 0), False)
        output, lse, *_ = self._interface()._flash_attention_forward(
            *arguments, scale=call.scale, window_size_left=window[0], window_size_right=window[1]
        )
        return output, lse

    def _varlen_backward(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: Call, window: tuple[int, int]
    ) -> Gradients:
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        arguments = (g, q, k, v, o, lse, *_lengths(call), 0.0, window == (-1, 0), *no_dropout)
        return self._interface()._flash_attention_backward(
            *arguments, scale=call.scale, window_size_left=window[0], window_size_right=window[1]
        )


class FlashAttn2(CudaFlash):
    """The ``flash-attn`` package, version 2.7 or later."""

    name = "flash-attn-2"

    def missing(self) -> str | None:
        if importlib.util.find_spec("flash_attn") is None:
            return _NOT_INSTALLED
        try:
            version = importlib.metadata.version("flash-attn")
        except importlib.metadata.PackageNotFoundError:  # flash-attn-4 has a module of the same name
            return _NOT_INSTALLED
        if tuple(int(part) for part in version.split(".")[:2]) < (2, 7):
            return f"flash-attn {version} is too old, 2.7 is needed"
        return super().missing()

    def _interface(self) -> Any:
        return importlib.import_module("flash_attn.flash_attn_interface")

    def _varlen_forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, window: tuple[int, int]) -> Result:
        how = self._how(call, window)
        output, lse, *_ = self._interface()._flash_attn_varlen_forward(q, k, v, *_lengths(call), **how)
        return output, lse

    def _varlen_backward(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: Call, window: tuple[int, int]
    ) -> Gradients:
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        how = self._how(call, window) | {"softcap": 0.0, "alibi_slopes": None}
        how["deterministic"] = torch.are_deterministic_algorithms_enabled()
        self._interface()._flash_attn_varlen_backward(g, q, k, v, o, lse, dq, dk, dv, *_lengths(call), **how)
        return dq, dk, dv

    def _how(self, call: Call, window: tuple[int, int]) -> dict[str, Any]:
        """What both directions are told."""
        left, right = window
        how = {"dropout_p": 0.0, "softmax_scale": call.scale, "causal": call.causal}
        return how | {"window_size_left": left, "window_size_right": right}


class HubFlash(FlashAttn2):
    """The Hub's pre-built FlashAttention-2, through the ``kernels`` package."""

    name = "hub-flash-attn-2"
    only_when_named = True

    def missing(self) -> str | None:
        if importlib.util.find_spec("kernels") is None:
            return "kernels is not installed"
        return CudaFlash.missing(self)

    @functools.cached_property
    def _module(self) -> Any:
        kernels = importlib.import_module("kernels")
        return kernels.get_kernel(HUB_KERNEL)

    def _interface(self) -> Any:
        return self._module.flash_attn_interface


def _lengths(call: Call) -> tuple[Tensor, Tensor, int, int]:
    """The rows as these interfaces take them: offsets of queries and keys, longest row of each."""
    rows = call.rows
    return rows.cu_queries, rows.cu_keys, rows.longest_query, rows.longest_key


def _window(call: Call) -> tuple[int, int]:
    """Keys seen to the left and to the right; -1 for all."""
    if not call.causal:
        return -1, -1
    return (-1 if call.window is None else call.window), 0
