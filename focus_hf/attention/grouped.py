"""The exact decomposition of hard Focus attention: cost follows the number of attended pairs, forward and backward.

See `plan` for the parts. Each is computed by a kernel and merged by its logsumexp; the backward runs each part
with the merged output and logsumexp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from .kernels import Call, Kernel, find_kernel
from .mask import Pattern
from .merge import Accumulator
from .plan import Plan, make_plan
from .rows import Gatherer, Part, take

#: Queries of a sliding window handled together by kernels that work row by row; bounds their memory.
WINDOW_QUERIES = 2048


def grouped_focus_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    positions: Tensor,
    memberships: Tensor,
    scale: float,
    *,
    documents: Tensor | None = None,
    sink_logits: Tensor | None = None,
    kernel: Kernel | None = None,
) -> Tensor:
    """Hard Focus attention of the last ``Q`` of ``S`` tokens: whole sequences, or a chunk against a longer cache.

    Equal to `masked_focus_attention` up to rounding, and differentiable in query, key, value and sink logits, at the
    cost of the attended pairs. Memory is linear in ``S``. Memberships have no gradient here (`credit_memberships`).

    Args:
        query: ``(B, H, Q, D)``.
        key: ``(B, H_kv, S, D)``.
        value: ``(B, H_kv, S, D_v)``, ``D_v <= D``.
        pattern: window, sinks, dense start.
        positions: ``(B, S)`` integers, a token's rank in its document, ``PADDING`` for padding anywhere.
        memberships: ``(B, S, K)`` bool; every token that is not padding belongs to at least one group.
        scale: factor on ``q . k``.
        documents: ``(B, S)`` integers that never fall along a sequence, for several documents packed into one.
        sink_logits: ``(H,)``, a learned logit per head that takes part in the softmax (gpt-oss).
        kernel: the backend; by default the best one for these tensors.

    Returns:
        ``(B, H, Q, D_v)`` in the dtype of ``query`` (a transposed view of ``(B, Q, H, D_v)``); zeros for padding.
    """
    kernel = find_kernel(query, value) if kernel is None else kernel
    batch, num_heads, num_queries, _ = query.shape
    if kernel.one_row_at_a_time and batch > 1:
        outputs = [
            grouped_focus_attention(
                query[row : row + 1],
                key[row : row + 1],
                value[row : row + 1],
                pattern,
                positions[row : row + 1],
                memberships[row : row + 1],
                scale,
                documents=None if documents is None else documents[row : row + 1],
                sink_logits=sink_logits,
                kernel=kernel,
            ).transpose(1, 2)
            for row in range(batch)
        ]
        return torch.cat(outputs).transpose(1, 2)
    with record_function("focus: plan"):
        plan = make_plan(pattern, positions, memberships, num_queries, documents)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    output = _GroupedAttention.apply(q, k, v, sink_logits, plan, scale, kernel)
    return output.view(batch, num_queries, num_heads, value.shape[-1]).transpose(1, 2)


def attend_parts(query: Tensor, key: Tensor, value: Tensor, plan: Plan, scale: float, kernel: Kernel) -> Accumulator:
    """Run a plan on flat tokens: ``(Tq, H, D)``, ``(Tk, H_kv, D)``, ``(Tk, H_kv, D_v)``."""
    every_query = plan.num_queries == query.shape[0]
    whole = Accumulator(query.shape[0], query.shape[1], value.shape[-1], query, every_query)
    queries, keys, values = Gatherer(query, "query"), Gatherer(key, "key"), Gatherer(value, "value")
    for part, call, is_first in _calls(plan, scale, kernel):
        with record_function("focus: gather"):
            q, k, v = queries.take(part.queries), keys.take(part.keys), values.take(part.keys)
        with record_function("focus: groups" if call.window is None else "focus: window"):
            output, lse = kernel.forward(q, k, v, call)
        with record_function("focus: merge"):
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
    if plan.groups is None or plan.window is None:  # no query is left
        return
    # Where queries are in several rows of the groups, only the window has each of them once.
    if plan.one_group_each:
        for part in plan.groups.split() if by_row else [plan.groups]:
            yield part, Call(part.rows, scale), True
    for part in plan.window.split_window(plan.local_window, WINDOW_QUERIES) if by_row else [plan.window]:
        yield part, Call(part.rows, scale, plan.local_window, part.exclude), not plan.one_group_each
    if not plan.one_group_each:
        for part in plan.groups.split():
            yield part, Call(part.rows, scale, exclude=part.exclude), False
