"""The additive gate on attention kernels: exact, differentiable, and linear in memory.

For distributions ``g`` the gated score is bilinear::

    scale * q_i . k_j - strength * (1 - g_i . g_j) = scale * [q_i, (strength / scale) g_i] . [k_j, g_j] - strength

so distant pairs are one causal call with longer heads, of all queries but the first ``w + 1`` against all keys but the
last ``w + 1``, which makes every pair in it distant. Local pairs are a sliding window. A sink's ``g`` is all ones, so
that its bias is exactly 0. The two are merged, and each has its backward with the merged output and logsumexp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..definition import Pattern
from ..kernels import Call, Kernel
from ..merge import Accumulator
from ..rows import Rows


def additive_gate_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    assignments: Tensor,
    pattern: Pattern,
    scale: float,
    strength: float,
    kernel: Kernel,
) -> Tensor:
    """One document without padding.

    Args:
        query: ``(T, H, D)``.
        key: ``(T, H_kv, D)``.
        value: ``(T, H_kv, D_v)``.
        assignments: ``(T, K)``, rows that sum to 1.
        pattern: window, sinks, dense start.
        scale: factor on ``q . k``.
        strength: ``lambda``, non-negative.
        kernel: the backend.

    Returns:
        ``(T, H, D_v)`` in the dtype of ``query``.
    """
    return _AdditiveGate.apply(query, key, value, assignments, pattern, scale, strength, kernel)


class _AdditiveGate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        assignments: Tensor,
        pattern: Pattern,
        scale: float,
        strength: float,
        kernel: Kernel,
    ) -> Tensor:
        length = query.shape[0]
        whole = Accumulator(length, query.shape[1], value.shape[-1], query, every_query=True)
        dense, gap = cut(pattern, length)
        for part, call in _ungated_calls(length, dense, pattern, scale, query.device):
            whole.put(part, *kernel.forward(query[part], key[: part.stop], value[: part.stop], call))
        start = max(gap, dense)
        if start < length:
            q, k = _lengthen(query, key, assignments, start, gap, pattern, scale, strength)
            call = Call(Rows.single(length - start, length - gap, query.device), scale)
            output, lse = kernel.forward(q, k, value[: length - gap], call)
            whole.add(slice(start, length), output, lse - strength)
        output = whole.output.to(query.dtype)
        ctx.save_for_backward(query, key, value, assignments, output, whole.lse)
        ctx.pattern, ctx.scale, ctx.strength, ctx.kernel = pattern, scale, strength, kernel
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, assignments, output, lse = ctx.saved_tensors
        pattern, scale, strength, kernel = ctx.pattern, ctx.scale, ctx.strength, ctx.kernel
        dtype = torch.promote_types(query.dtype, torch.float32)
        dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (query, key, value))
        dg = torch.zeros(assignments.shape, dtype=dtype, device=assignments.device)
        length, head_dim = query.shape[0], query.shape[-1]
        dense, gap = cut(pattern, length)
        for part, call in _ungated_calls(length, dense, pattern, scale, query.device):
            keys = slice(0, part.stop)
            gradients = kernel.backward(grad[part], query[part], key[keys], value[keys], output[part], lse[part], call)
            for total, index, gradient in zip((dq, dk, dv), (part, keys, keys), gradients, strict=True):
                total[index] += gradient
        start = max(gap, dense)
        if start < length:
            q, k = _lengthen(query, key, assignments, start, gap, pattern, scale, strength)
            queries, keys = slice(start, length), slice(0, length - gap)
            call = Call(Rows.single(length - start, length - gap, query.device), scale)
            more_q, more_k, more_v = kernel.backward(
                grad[queries], q, k, value[keys], output[queries], lse[queries] + strength, call
            )
            columns = slice(head_dim, head_dim + assignments.shape[-1])
            dq[queries] += more_q[..., :head_dim]
            dk[keys] += more_k[..., :head_dim]
            dv[keys] += more_v
            dg[queries] += more_q[..., columns].to(dtype).sum(dim=1) * (strength / scale)
            from_keys = more_k[..., columns].to(dtype).sum(dim=1)
            from_keys[: pattern.sink_tokens] = 0.0  # their ones are constants
            dg[keys] += from_keys
        gradients = (dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), dg.to(assignments.dtype))
        return (*gradients, None, None, None, None)


def cut(pattern: Pattern, length: int) -> tuple[int, int]:
    """Where queries stop being dense, and the smallest distance of a distant pair."""
    return min(pattern.dense_below, length), pattern.local_window + 1


def _ungated_calls(
    length: int, dense: int, pattern: Pattern, scale: float, device: torch.device
) -> list[tuple[slice, Call]]:
    """The queries below ``dense_below`` with all keys, and the windows of the others."""
    calls = []
    if dense:
        calls.append((slice(0, dense), Call(Rows.single(dense, dense, device), scale)))
    if dense < length:
        rows = Rows.single(length - dense, length, device)
        calls.append((slice(dense, length), Call(rows, scale, window=pattern.local_window)))
    return calls


def _lengthen(
    query: Tensor,
    key: Tensor,
    assignments: Tensor,
    start: int,
    gap: int,
    pattern: Pattern,
    scale: float,
    strength: float,
) -> tuple[Tensor, Tensor]:
    """Heads that carry the assignments: queries from ``start`` on, keys up to ``gap`` before the end."""
    num_groups = assignments.shape[-1]
    width = -(-(query.shape[-1] + num_groups) // 8) * 8 - query.shape[-1]
    of_query = F.pad(assignments * (strength / scale), (0, width - num_groups)).to(query.dtype)
    of_key = assignments.clone()
    of_key[: pattern.sink_tokens] = 1.0
    of_key = F.pad(of_key, (0, width - num_groups)).to(key.dtype)
    length = query.shape[0]
    q, k = query[start:], key[: length - gap]
    return (
        torch.cat([q, of_query[start:, None].expand(-1, q.shape[1], -1)], dim=-1),
        torch.cat([k, of_key[: length - gap, None].expand(-1, k.shape[1], -1)], dim=-1),
    )
