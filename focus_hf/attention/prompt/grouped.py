"""The exact decomposition of hard Focus attention: cost follows the number of attended pairs, forward and backward.

See `plan` for the parts. Each is computed by a kernel and merged by its logsumexp; the backward runs each part
with the merged output and logsumexp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..kernels import Call, Kernel, find_kernel
from ..merge import Accumulator
from ..problem import Problem
from ..rows import Part, take
from ..steps import step
from .plan import Plan, make_plan

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
    batch, num_heads, num_queries, _ = problem.query.shape
    if kernel.one_row_at_a_time and batch > 1:
        outputs = [grouped_focus_attention(problem.sequence(row), kernel).transpose(1, 2) for row in range(batch)]
        return torch.cat(outputs).transpose(1, 2)
    with step("plan"):
        plan = make_plan(problem.who, num_queries)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (problem.query, problem.key, problem.value))
    output = _GroupedAttention.apply(q, k, v, problem.scores.sink_logits, plan, problem.scores.scale, kernel)
    return output.view(batch, num_queries, num_heads, problem.value.shape[-1]).transpose(1, 2)


def attend_parts(query: Tensor, key: Tensor, value: Tensor, plan: Plan, scale: float, kernel: Kernel) -> Accumulator:
    """Run a plan on flat tokens: ``(Tq, H, D)``, ``(Tk, H_kv, D)``, ``(Tk, H_kv, D_v)``."""
    every_query = plan.num_queries == query.shape[0]
    whole = Accumulator(query.shape[0], query.shape[1], value.shape[-1], query, every_query)
    for part, call, is_first in _calls(plan, scale, kernel):
        with step("gather"):
            q, k, v = take(query, part.queries), take(key, part.keys), take(value, part.keys)
        with step("groups" if call.window is None else "window"):
            output, lse = kernel.forward(q, k, v, call)
        with step("merge"):
            (whole.put if is_first else whole.add)(part.queries, output, lse)
    return whole


class _GroupedAttention(torch.autograd.Function):
    """``(B * Q, H, D)``, ``(B * S, H_kv, D)``, ``(B * S, H_kv, D_v)`` to ``(B * Q, H, D_v)``."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink_logits: Tensor | None,
        plan: Plan,
        scale: float,
        kernel: Kernel,
    ) -> Tensor:
        whole = attend_parts(query, key, value, plan, scale, kernel)
        if sink_logits is not None:
            whole.add_logits(sink_logits)
        output = whole.output.to(query.dtype)
        ctx.save_for_backward(query, key, value, sink_logits, output, whole.lse)
        ctx.plan, ctx.scale, ctx.kernel = plan, scale, kernel
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sink_logits, output, lse = ctx.saved_tensors
        kernel: Kernel = ctx.kernel
        dtype = torch.promote_types(query.dtype, torch.float32)
        dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (query, key, value))
        for part, call, _ in _calls(ctx.plan, ctx.scale, kernel):
            q, k, v = take(query, part.queries), take(key, part.keys), take(value, part.keys)
            g, o, log = (take(x, part.queries) for x in (grad, output, lse))
            if part.repeated is not None:  # a logsumexp of infinity: these pairs weigh nothing
                log = log.masked_fill(part.repeated[:, None], float("inf"))
            more_q, more_k, more_v = kernel.backward(g, q, k, v, o, log, call)
            for total, index, gradient in (
                (dq, part.queries, more_q),
                (dk, part.keys, more_k),
                (dv, part.keys, more_v),
            ):
                _add_at(total, index, gradient.to(dtype))
        d_logits = None
        if sink_logits is not None:
            # The logit's value is zero, so its softmax weight times minus (gradient . output).
            weight = torch.exp(sink_logits.to(dtype) - lse).masked_fill(lse == float("-inf"), 0.0)
            d_logits = -(weight * (grad.to(dtype) * output).sum(dim=-1)).sum(dim=0).to(sink_logits.dtype)
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), d_logits, None, None, None


def _add_at(total: Tensor, index: Tensor | slice, gradient: Tensor) -> None:
    if isinstance(index, slice):
        total[index] += gradient
    else:
        total.index_add_(0, index, gradient)


def _calls(plan: Plan, scale: float, kernel: Kernel) -> Iterator[tuple[Part, Call, bool]]:
    """The kernel calls of a plan, and for each whether it is the first with its queries."""
    by_row = kernel.one_row_at_a_time
    if plan.dense is not None:
        for part in plan.dense.split() if by_row else [plan.dense]:
            yield part, Call(part.rows, scale), True
    # Where queries are in several rows of the groups, or in none, only the window has each of them once.
    groups_first = plan.one_group_each
    if plan.groups is not None and groups_first:
        for part in plan.groups.split() if by_row else [plan.groups]:
            yield part, Call(part.rows, scale), True
    if plan.window is not None:
        for part in plan.window.split_window(plan.local_window, WINDOW_QUERIES) if by_row else [plan.window]:
            yield part, Call(part.rows, scale, plan.local_window, part.exclude), not groups_first
    if plan.groups is not None and not groups_first:
        for part in plan.groups.split():
            yield part, Call(part.rows, scale, exclude=part.exclude), False
    if plan.sinks is not None:
        for part in plan.sinks.split() if by_row else [plan.sinks]:
            yield part, Call(part.rows, scale, causal=False), False
