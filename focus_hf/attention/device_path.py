"""Hard Focus attention on kernels that take ragged rows in one call, by a plan that is made on the device.

The same function as `grouped`, with a number of operations that grows neither with the batch nor with the data, and
nothing read back: the host runs ahead, ``torch.compile`` sees one graph, a CUDA graph can record it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .device_plan import DevicePart, DevicePlan, make_device_plan
from .kernels import Call, Kernel
from .mask import WhoAttends
from .problem import Problem
from .steps import step


def fits_device(who: WhoAttends, kernel: Kernel) -> bool:
    """Whether enough is known about the tokens, and whether the kernel takes many rows in one call."""
    return not kernel.one_row_at_a_time and who.known is not None and who.known.groups_each is not None


def device_focus_attention(problem: Problem, kernel: Kernel) -> Tensor:
    """As `grouped_focus_attention`, for a problem that `fits_device`."""
    with step("plan"):
        plan = make_device_plan(problem.who, problem.num_queries)
    q, k, v = flat_tokens(problem)
    logits, scale = problem.scores.sink_logits, problem.scores.scale
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        output = _DeviceAttention.apply(q, k, v, logits, plan, scale, kernel)
    else:
        output, lse = attend_on_device(q, k, v, plan, scale, kernel, needs_lse=logits is not None)
        output, _ = _finish(output, lse, logits, plan.is_real, q.dtype)
    return _by_sequence(problem, output)


def flat_tokens(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """``(B * Q, H, D)``, ``(B * S, H_kv, D)``, ``(B * S, H_kv, D_v)``."""
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (problem.query, problem.key, problem.value))
    return q, k, v


def finish(problem: Problem, output: Tensor, lse: Tensor | None, is_real: Tensor | None) -> Tensor:
    """What `attend_on_device` gave, with sink logits, and zeros for padding: ``(B, H, Q, D_v)``."""
    output, _ = _finish(output, lse, problem.scores.sink_logits, is_real, problem.query.dtype)
    return _by_sequence(problem, output)


def _by_sequence(problem: Problem, output: Tensor) -> Tensor:
    batch, num_heads, num_queries, _ = problem.query.shape
    return output.view(batch, num_queries, num_heads, problem.value.shape[-1]).transpose(1, 2)


def attend_on_device(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: DevicePlan,
    scale: float,
    kernel: Kernel,
    needs_lse: bool,
    more: Sequence[tuple[Tensor, Tensor]] = (),
) -> tuple[Tensor, Tensor | None]:
    """Run a plan on flat tokens.

    Args:
        query, key, value: see `flat_tokens`.
        plan: for these tokens.
        scale: factor on ``q . k``.
        kernel: the backend.
        needs_lse: whether to return it.
        more: results over other keys, to be merged with those of the plan's parts; as `_run` gives them.

    Returns:
        Output ``(B * Q, H, D_v)``, and its logsumexp ``(B * Q, H)`` if it is needed.
    """
    results = [*(_run(part, query, key, value, scale, kernel) for part in plan.parts), *more]
    output, lse = _merge(results, needs_lse)
    if plan.dense is not None and plan.is_dense is not None:
        dense, dense_lse = _merge([_run(plan.dense, query, key, value, scale, kernel)], needs_lse)
        output = torch.where(plan.is_dense[:, None, None], dense, output)
        if lse is not None and dense_lse is not None:
            lse = torch.where(plan.is_dense[:, None], dense_lse, lse)
    return output, lse


def _finish(
    output: Tensor, lse: Tensor | None, sink_logits: Tensor | None, is_real: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    if sink_logits is not None and lse is not None:
        own = sink_logits.to(lse.dtype)
        output, lse = output * torch.sigmoid(lse - own)[..., None], torch.logaddexp(lse, own)
    output = output.to(dtype)
    if is_real is not None:  # and padding may be anything up to here, NaN too
        output = torch.where(is_real[:, None, None], output, 0.0)
        lse = None if lse is None else torch.where(is_real[:, None], lse, float("-inf"))
    return output, lse


def _run(
    part: DevicePart, query: Tensor, key: Tensor, value: Tensor, scale: float, kernel: Kernel
) -> tuple[Tensor, Tensor]:
    """A part's results by query: ``(B * Q, c, H, D_v)`` and logsumexps ``(B * Q, c, H)``."""
    with step("gather"):
        q, k, v = _take(query, part.queries), _take(key, part.keys), _take(value, part.keys)
    with step("groups" if part.window is None else "window"):
        output, lse = kernel.forward(q, k, v, _call(part, scale))
    if part.slots is None:
        output, lse = output[:, None], lse[:, None]
    else:
        with step("gather"):
            count = part.slots.shape[1]
            output, lse = (_take(x, part.slots.flatten()).unflatten(0, (-1, count)) for x in (output, lse))
    if part.no_keys is not None:
        lse = lse.masked_fill(part.no_keys[:, None, None], float("-inf"))
    return output, lse


def _call(part: DevicePart, scale: float) -> Call:
    return Call(part.rows, scale, part.window, part.exclude, part.causal)


def _take(tokens: Tensor, index: Tensor | None) -> Tensor:
    return tokens if index is None else tokens.index_select(0, index)


def _merge(results: list[tuple[Tensor, Tensor]], needs_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Results over disjoint sets of keys, as `_run` gives them, into one: weighted by their logsumexps."""
    if len(results) == 1 and results[0][1].shape[1] == 1:
        return results[0][0][:, 0], results[0][1][:, 0]
    with step("merge"):
        lses = torch.cat([lse for _, lse in results], dim=1)
        weights, first = torch.softmax(lses, dim=1)[..., None], 0
        total: Tensor | None = None
        for output, lse in results:
            count = lse.shape[1]
            weighted = output * weights[:, first : first + count]
            part = weighted[:, 0] if count == 1 else weighted.sum(dim=1)
            total, first = part if total is None else total + part, first + count
        assert total is not None
        return total, torch.logsumexp(lses, dim=1) if needs_lse else None


class _DeviceAttention(torch.autograd.Function):
    """``(B * Q, H, D)``, ``(B * S, H_kv, D)``, ``(B * S, H_kv, D_v)`` to ``(B * Q, H, D_v)``."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink_logits: Tensor | None,
        plan: DevicePlan,
        scale: float,
        kernel: Kernel,
    ) -> Tensor:
        output, lse = attend_on_device(query, key, value, plan, scale, kernel, needs_lse=True)
        output, lse = _finish(output, lse, sink_logits, plan.is_real, query.dtype)
        ctx.save_for_backward(query, key, value, sink_logits, output, lse)
        ctx.plan, ctx.scale, ctx.kernel = plan, scale, kernel
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sink_logits, output, lse = ctx.saved_tensors
        plan: DevicePlan = ctx.plan
        dtype = torch.promote_types(query.dtype, torch.float32)
        totals = tuple(torch.zeros_like(x, dtype=dtype) for x in (query, key, value))
        beyond = None if plan.is_dense is None else ~plan.is_dense
        for part in plan.parts:
            _add_gradients(totals, part, _both(beyond, plan.is_real), grad, ctx.saved_tensors, ctx.scale, ctx.kernel)
        if plan.dense is not None:
            mine = _both(plan.is_dense, plan.is_real)
            _add_gradients(totals, plan.dense, mine, grad, ctx.saved_tensors, ctx.scale, ctx.kernel)
        d_logits = None
        if sink_logits is not None:
            # The logit's value is zero, so its softmax weight times minus (gradient . output).
            weight = torch.exp(sink_logits.to(dtype) - lse).masked_fill(lse == float("-inf"), 0.0)
            d_logits = -(weight * (grad.to(dtype) * output).sum(dim=-1)).sum(dim=0).to(sink_logits.dtype)
        dq, dk, dv = totals
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), d_logits, None, None, None


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a & b


def _add_gradients(
    totals: tuple[Tensor, ...],
    part: DevicePart,
    mine: Tensor | None,
    grad: Tensor,
    saved: tuple[Tensor, ...],
    scale: float,
    kernel: Kernel,
) -> None:
    """Add a part's gradients to those of query, key and value.

    Args:
        totals: of query, key and value; changed.
        part: its pairs.
        mine: ``(B * Q,)`` bool, the queries that have a place in it; ``None`` for all.
        grad: of the output.
        saved: query, key, value, sink logits, output and logsumexp of the whole attention.
        scale: factor on ``q . k``.
        kernel: the backend.
    """
    query, key, value, _, output, lse = saved
    q, k, v = _take(query, part.queries), _take(key, part.keys), _take(value, part.keys)
    g, o, log = (_take(x, part.queries) for x in (grad, output, lse))
    if part.slots is not None:
        # A sink's repeated results weigh nothing, which a logsumexp of infinity says.
        where = part.slots if mine is None else torch.where(mine[:, None], part.slots, log.shape[0])
        counted = torch.zeros(log.shape[0] + 1, dtype=torch.bool, device=log.device)
        counted = counted.index_fill(0, where.flatten(), True)[:-1]
        log = log.masked_fill(~counted[:, None], float("inf"))
    elif mine is not None:
        log = log.masked_fill(~mine[:, None], float("inf"))
    dq, dk, dv = kernel.backward(g, q, k, v, o, log, _call(part, scale))
    if part.slots is not None:
        dq = _take(dq, part.slots.flatten()).unflatten(0, part.slots.shape).sum(dim=1)
    totals[0].add_(dq if mine is None else torch.where(mine[:, None, None], dq, 0.0))
    if part.keys is None:
        totals[1].add_(dk)
        totals[2].add_(dv)
        return
    used = torch.arange(part.keys.shape[0], device=key.device) < part.rows.cu_keys[-1]
    for total, gradient in ((totals[1], dk), (totals[2], dv)):
        total.index_add_(0, part.keys, torch.where(used[:, None, None], gradient, 0.0).to(total.dtype))
