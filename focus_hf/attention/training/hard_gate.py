"""Training through hard attention: the gradient of memberships, which are yes or no.

Hard attention's own gradient sees the pairs that are attended and none of the others, so it cannot say which group a
token should be in instead. But what a pair adds to what a token has without groups is known to first order whether it
is attended or not: ``p_ij * (v_j - l_i) . do_i``, with the weight ``p_ij`` that the pair has in dense attention, the
output ``l`` of attention to window and sinks alone, and the gradient ``do`` of hard attention's output. Summed over
the tokens of a group, that is the gradient for being in it (`credit_memberships`).

Counted from hard attention's own output instead, a token's group would seem to add little, because it has been added,
and every other group much: tokens would be drawn away from wherever they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..definition import Pattern, dense_pairs, near_pairs, sequences, without_groups
from ..kernels import Call, Kernel, Rows, find_kernel, lengthen
from ..masked import repeat_heads
from ..paths import focus_attention
from ..problem import Problem, Scores

#: Queries handled together where scores are spelled out.
QUERY_CHUNK = 256


def credit_memberships(
    output: Tensor, assignments: Tensor, problem: Problem, *, kernel: Kernel | None = None
) -> Tensor:
    """The output of hard attention, unchanged, with a gradient for the assignments that it was computed from.

    Each distant pair (beyond the window, no sink, no query below ``dense_below``) counts with ``a_i . a_j``; a pair
    with two groups in common counts twice. Costs dense attention, forward and backward, and attention to the window in
    the backward pass, and memory linear in ``T``. Kernels compute everything but masks, soft-capping and biases.

    Args:
        output: of hard attention, ``(B, H, T, D_v)``.
        assignments: ``(B, T, K)`` float with the values of the memberships (`focus_hf.routing.straight_through`).
        problem: that was computed, whole sequences; no gradient flows to its tensors from here. Pairs are credited
            with what they are worth without dropout.
        kernel: the backend; by default the best one for these tensors.

    Returns:
        ``output``.
    """
    alone = replace(problem, who=without_groups(problem.who), scores=replace(problem.scores, dropout=0.0))
    return _CreditMemberships.apply(output, assignments, alone, kernel)


class _CreditMemberships(torch.autograd.Function):
    """The problem is that of window and sinks alone."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, assignments: Tensor, problem: Problem, kernel: Kernel | None) -> Tensor:
        scores = problem.scores
        large = (problem.query, problem.key, problem.value, scores.sink_logits, scores.bias, problem.who.extra_mask)
        ctx.save_for_backward(assignments, *(None if x is None else x.detach() for x in large))
        nothing = replace(scores, sink_logits=None, bias=None)
        ctx.rest = replace(problem.who, extra_mask=None), nothing
        ctx.kernel = kernel
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        assignments, query, key, value, logits, bias, extra_mask = ctx.saved_tensors
        who, scores = ctx.rest
        scores, who = replace(scores, sink_logits=logits, bias=bias), replace(who, extra_mask=extra_mask)
        problem = Problem(query, key, value, who, scores)
        without = focus_attention(problem, kernel=ctx.kernel)
        if not problem.is_plain:
            return grad, _spelled_out(grad, without, assignments, problem), None, None
        kernel = _kernel_for(problem.query, problem.value, assignments, ctx.kernel)
        credit = torch.zeros_like(assignments)
        token_major = [x.transpose(1, 2) for x in (grad, without, problem.query, problem.key, problem.value)]
        for row, tokens, _ in sequences(problem.who):
            do, alone, q, k, v, a = (x[row][tokens] for x in (*token_major, assignments))
            credit[row, tokens] = _by_kernel(do, alone, q, k, v, a, problem.who.pattern, problem.scores, kernel)
        return grad, credit, None, None


def _kernel_for(query: Tensor, value: Tensor, assignments: Tensor, named: Kernel | None) -> Kernel:
    """The backend asked for, or the best one, for heads as long as `_by_kernel` makes them."""
    longer = query.new_empty(()).expand(*query.shape[:-1], query.shape[-1] + 2 * assignments.shape[-1])
    return find_kernel(longer, value) if named is None or named.unsupported(longer, value) is not None else named


def _by_kernel(
    grad: Tensor,
    without_groups: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    assignments: Tensor,
    pattern: Pattern,
    scores: Scores,
    kernel: Kernel,
) -> Tensor:
    """``(T, K)`` for one document without padding; ``(T, H, D)`` and so on."""
    scale = scores.scale
    length, head_dim, num_groups = query.shape[0], query.shape[-1], assignments.shape[-1]
    gap = pattern.local_window + 1  # the smallest distance of a distant pair
    start = max(pattern.dense_below, gap)
    credit = torch.zeros_like(assignments)
    if start >= length:
        return credit
    _, lse = kernel.forward(query[start:], key, value, Call(Rows.single(length - start, length, query.device), scale))
    if scores.sink_logits is not None:
        lse = torch.logaddexp(lse, scores.sink_logits.to(lse.dtype))
    # Columns that leave every score as it is: where one side has a token's assignments, the other has zeros, whose
    # gradient is therefore the sum of the other side's assignments, weighted by the gradients of the scores.
    queries, keys = slice(start, length), slice(0, length - gap)
    zeros = torch.zeros_like(assignments)
    of_keys = assignments.clone()
    of_keys[: pattern.sink_tokens] = 0.0
    q = lengthen(query[queries], torch.cat([zeros[queries], assignments[queries]], dim=-1))
    k = lengthen(key[keys], torch.cat([of_keys[keys], zeros[keys]], dim=-1))
    call = Call(Rows.single(length - start, length - gap, query.device), scale)
    dq, dk, _ = kernel.backward(grad[queries], q, k, value[keys], without_groups[queries], lse, call)
    first = slice(head_dim, head_dim + num_groups)
    second = slice(first.stop, first.stop + num_groups)
    credit[queries] += dq[..., first].sum(dim=1, dtype=credit.dtype) / scale
    from_keys = dk[..., second].sum(dim=1, dtype=credit.dtype) / scale
    from_keys[: pattern.sink_tokens] = 0.0
    credit[keys] += from_keys
    return credit


def _spelled_out(grad: Tensor, without_groups: Tensor, assignments: Tensor, problem: Problem) -> Tensor:
    """``(B, T, K)``, some queries at a time."""
    query, how = problem.query, problem.scores
    key, value = repeat_heads(problem.key, query.shape[1]), repeat_heads(problem.value, query.shape[1])
    dtype = assignments.dtype
    credit = torch.zeros_like(assignments)
    for start in range(0, problem.num_queries, QUERY_CHUNK):
        rows, columns = slice(start, start + QUERY_CHUNK), slice(0, start + QUERY_CHUNK)
        allowed = dense_pairs(problem.who, rows, columns)
        near = near_pairs(problem.who, rows, columns)
        scores = torch.matmul(query[:, :, rows], key[:, :, columns].transpose(-1, -2)).to(dtype) * how.scale
        if how.softcap is not None:
            scores = how.softcap * torch.tanh(scores / how.softcap)
        if (bias := how.part(rows, columns).bias) is not None:
            scores = scores + bias.to(dtype)
        scores = scores.masked_fill(~allowed, float("-inf"))
        lse = torch.logsumexp(scores, dim=-1, keepdim=True)
        if how.sink_logits is not None:
            lse = torch.logaddexp(lse, how.sink_logits.to(dtype)[None, :, None, None])
        weights = torch.exp(scores - lse).masked_fill(~allowed | near[:, None], 0.0)
        do, alone = grad[:, :, rows].to(dtype), without_groups[:, :, rows].to(dtype)
        gain = torch.matmul(do, value[:, :, columns].to(dtype).transpose(-1, -2)) - (do * alone).sum(-1, keepdim=True)
        pairs = (weights * gain).sum(dim=1)
        credit[:, rows] += pairs @ assignments[:, columns]
        credit[:, columns] += pairs.transpose(-1, -2) @ assignments[:, rows]
    return credit
