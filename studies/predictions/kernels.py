"""Calls of the Triton kernels beside dense attention, on random tensors that read a given share of their pairs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from focus_hf.attention.kernels import triton_gather, triton_prompt
from focus_hf.bench import Setting

from .work import BANDS


def calls(
    setting: Setting, phase: str, batch: int, share: float, tokens_alike: int = 8
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Dense attention, and Focus given groups and tables.

    Args:
        setting: of the call; its device is a GPU.
        phase: ``"prefill"``, or ``"decode"`` of one token.
        batch: sequences.
        share: of the cells that a query reads.
        tokens_alike: so many consecutive tokens read the same cells, which on text they nearly do: of eight, 32 tokens
            together read 3.4 times what each reads, where a tenth is read; on text 3.3 times.
    """
    length, device, dtype = setting.length, setting.device, setting.torch_dtype
    new, groups = (length if phase == "prefill" else 1), setting.num_groups

    def heads(count: int, tokens: int) -> Tensor:
        return torch.randn(batch, count, tokens, setting.head_dim, device=device, dtype=dtype)

    query, key, value = heads(setting.heads, new), heads(setting.kv_heads, length), heads(setting.kv_heads, length)
    key_groups = torch.randint(groups, key.shape[:3], dtype=torch.uint8, device=device)
    few = -(-new // tokens_alike)
    reads = torch.rand(batch, setting.kv_heads, few, groups, BANDS, device=device) < share
    reads = reads.repeat_interleave(tokens_alike, dim=2)[:, :, :new].contiguous()
    last = torch.full((batch, 1), length - 1, device=device)
    scale, window, sinks = setting.head_dim**-0.5, setting.local_window, setting.sink_tokens

    def dense() -> Tensor:
        repeated = setting.heads != setting.kv_heads
        return F.scaled_dot_product_attention(query, key, value, is_causal=phase == "prefill", enable_gqa=repeated)

    def focus() -> Tensor:
        tensors = query, key, value, key_groups, reads
        if phase == "decode":
            return triton_gather.sparse_decode(*tensors, last, scale=scale, local_window=window, sink_tokens=sinks)
        return triton_prompt.sparse_prompt(*tensors, scale=scale, local_window=window, sink_tokens=sinks)[0]

    return dense, focus
