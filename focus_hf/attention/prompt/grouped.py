"""The exact decomposition of hard Focus attention: cost follows the number of attended pairs, forward and backward.

See `plan` for the parts. Each is computed by a kernel and merged by its logsumexp; the backward runs each part
with the merged output and logsumexp.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from ..kernels import Kernel, find_kernel, merge
from ..problem import Problem
from .plan import Part, make_plan

#: Queries of a sliding window handled together by kernels that work row by row; bounds their memory.
WINDOW_QUERIES = 2048


def grouped_focus_attention(problem: Problem, kernel: Kernel | None = None) -> Tensor:
    """Hard Focus attention on kernels.

    Equal to `masked_focus_attention` up to rounding, and differentiable in query, key, value and sink logits, at the
    cost of the attended pairs. Memory is linear in ``S``. Memberships have no gradient here (`credit_memberships`).

    Args:
        problem: what to compute, with ``D_v <= D``.
        kernel: the backend; by default the best one for these tensors.

    Returns:
        ``(B, H, Q, D_v)`` in the dtype of ``query`` (a transposed view of ``(B, Q, H, D_v)``); zeros for padding.
    """
    kernel = find_kernel(problem.query, problem.value) if kernel is None else kernel
    with _step("plan"):
        parts = make_plan(problem)
        if kernel.one_row_at_a_time:
            parts = [row for part in parts for row in part.split(WINDOW_QUERIES)]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (problem.query, problem.key, problem.value))
    output = _GroupedAttention.apply(q, k, v, problem.scores.sink_logits, parts, kernel)
    return output.unflatten(0, (-1, problem.num_queries)).transpose(1, 2)


class _GroupedAttention(torch.autograd.Function):
    """``(B * Q, H, D)``, ``(B * S, H_kv, D)``, ``(B * S, H_kv, D_v)`` to ``(B * Q, H, D_v)``."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink_logits: Tensor | None,
        parts: list[Part],
        kernel: Kernel,
    ) -> Tensor:
        dtype = torch.promote_types(query.dtype, torch.float32)
        some_lack = sum(len(part.queries) for part in parts if part.is_first) < len(query)  # padding
        make = query.new_zeros if some_lack else query.new_empty
        whole = make((*query.shape[:2], value.shape[-1]), dtype=dtype)
        lse = query.new_full(query.shape[:2], float("-inf"), dtype=dtype)
        for part in parts:
            with _step("gather"):
                (q,), (k, v) = _at(part.queries, query), _at(part.keys, key, value)
            with _step("groups" if part.call.window is None else "window"):
                more = kernel.forward(q, k, v, part.call)
            with _step("merge"):
                if not part.is_first:
                    before, before_lse = _at(part.queries, whole, lse)
                    more = merge(before, before_lse, *more)
                for total, rows in zip((whole, lse), more, strict=True):
                    total.index_copy_(0, part.queries, rows.to(dtype))
        if sink_logits is not None:  # a key of value zero
            whole, lse = merge(whole, lse, whole.new_zeros(1), sink_logits.to(dtype))
        output = whole.to(query.dtype)
        ctx.save_for_backward(query, key, value, sink_logits, output, lse)
        ctx.parts, ctx.kernel = parts, kernel
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sink_logits, output, lse = ctx.saved_tensors
        dtype = torch.promote_types(query.dtype, torch.float32)
        dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (query, key, value))
        for part in ctx.parts:
            asking, asked = part.queries, part.keys
            (g, q, o, log), (k, v) = _at(asking, grad, query, output, lse), _at(asked, key, value)
            gradients = ctx.kernel.backward(g, q, k, v, o, log, part.call)
            for total, index, gradient in zip((dq, dk, dv), (asking, asked, asked), gradients, strict=True):
                total.index_add_(0, index, gradient.to(dtype))
        d_logits = None
        if sink_logits is not None:
            # The logit's value is zero, so its softmax weight times minus (gradient . output).
            weight = torch.exp(sink_logits.to(dtype) - lse)
            d_logits = -(weight * (grad.to(dtype) * output).sum(dim=-1)).sum(dim=0).to(sink_logits.dtype)
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), d_logits, None, None


def _at(index: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Some rows of each tensor; on a CPU twice as fast as to index them."""
    return tuple(tensor.index_select(0, index) for tensor in tensors)


def _step(name: str) -> AbstractContextManager[object]:
    """``record_function("focus: " + name)``, which costs as much as a small operation, where a profiler runs."""
    if torch.compiler.is_compiling() or not torch.autograd._profiler_enabled():
        return nullcontext()
    return record_function(f"focus: {name}")
