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

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .additive_gate import cut
from .kernels import Call, Kernel, find_kernel
from .mask import Pattern, training_pairs
from .masked import repeat_heads
from .paths import focus_attention
from .plan import sequences
from .rows import Rows, take

#: Queries handled together where scores are spelled out.
QUERY_CHUNK = 256


def credit_memberships(
    output: Tensor,
    assignments: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    positions: Tensor,
    scale: float,
    *,
    documents: Tensor | None = None,
    extra_mask: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    kernel: Kernel | None = None,
) -> Tensor:
    """The output of hard attention, unchanged, with a gradient for the assignments that it was computed from.

    Each distant pair (beyond the window, no sink, no query below ``dense_below``) counts with ``a_i . a_j``; a pair
    with two groups in common counts twice. Costs dense attention, forward and backward, and attention to the window in
    the backward pass, and memory linear in ``T``. Kernels compute everything but masks and soft-capping.

    Args:
        output: of hard attention, ``(B, H, T, D_v)``.
        assignments: ``(B, T, K)`` float with the values of the memberships (`focus_hf.routing.straight_through`).
        query: ``(B, H, T, D)``; no gradient flows to it, key and value from here.
        key: ``(B, H_kv, T, D)``.
        value: ``(B, H_kv, T, D_v)``.
        pattern: window, sinks, dense start.
        positions: ``(B, T)`` integers, ``PADDING`` for padding.
        scale: factor on ``q . k``.
        documents, extra_mask: see `masked_focus_attention`.
        softcap, sink_logits: see `masked_attention`.
        kernel: the backend; by default the best one for these tensors.

    Returns:
        ``output``.
    """
    masks = (positions, documents, extra_mask)
    fixed = (query.detach(), key.detach(), value.detach(), None if sink_logits is None else sink_logits.detach())
    return _CreditMemberships.apply(output, assignments, *fixed, pattern, *masks, scale, softcap, kernel)


class _CreditMemberships(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        assignments: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink_logits: Tensor | None,
        pattern: Pattern,
        positions: Tensor,
        documents: Tensor | None,
        extra_mask: Tensor | None,
        scale: float,
        softcap: float | None,
        kernel: Kernel | None,
    ) -> Tensor:
        ctx.save_for_backward(assignments, query, key, value, sink_logits, positions, documents, extra_mask)
        ctx.pattern, ctx.scale, ctx.softcap, ctx.kernel = pattern, scale, softcap, kernel
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        assignments, query, key, value, sink_logits, positions, documents, extra_mask = ctx.saved_tensors
        without_groups = focus_attention(
            query,
            key,
            value,
            ctx.pattern,
            positions,
            torch.zeros_like(assignments, dtype=torch.bool),
            ctx.scale,
            documents=documents,
            extra_mask=extra_mask,
            softcap=ctx.softcap,
            sink_logits=sink_logits,
            kernel=ctx.kernel,
        )
        if ctx.softcap is None and extra_mask is None:
            kernel = _kernel_for(query, value, assignments, ctx.kernel)
            credit = torch.zeros_like(assignments)
            token_major = [x.transpose(1, 2) for x in (grad, without_groups, query, key, value)]
            for row, tokens, _ in sequences(positions, query.shape[2], documents):
                do, alone, q, k, v, a = (take(x[row], tokens) for x in (*token_major, assignments))
                credit[row, tokens] = _by_kernel(do, alone, q, k, v, a, sink_logits, ctx.pattern, ctx.scale, kernel)
        else:
            masks = (positions, documents, extra_mask)
            tensors = (grad, without_groups, query, key, value, assignments, sink_logits)
            credit = _spelled_out(*tensors, ctx.pattern, *masks, ctx.scale, ctx.softcap)
        return grad, credit, *(None,) * 11


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
    sink_logits: Tensor | None,
    pattern: Pattern,
    scale: float,
    kernel: Kernel,
) -> Tensor:
    """``(T, K)`` for one document without padding; ``(T, H, D)`` and so on."""
    length, head_dim, num_groups = query.shape[0], query.shape[-1], assignments.shape[-1]
    dense, gap = cut(pattern, length)
    start = max(dense, gap)
    credit = torch.zeros_like(assignments)
    if start >= length:
        return credit
    _, lse = kernel.forward(query[start:], key, value, Call(Rows.single(length - start, length, query.device), scale))
    if sink_logits is not None:
        lse = torch.logaddexp(lse, sink_logits.to(lse.dtype))
    # Columns that leave every score as it is: where one side has a token's assignments, the other has zeros, whose
    # gradient is therefore the sum of the other side's assignments, weighted by the gradients of the scores.
    queries, keys = slice(start, length), slice(0, length - gap)
    zeros = torch.zeros_like(assignments)
    of_keys = assignments.clone()
    of_keys[: pattern.sink_tokens] = 0.0
    q = _lengthen(query[queries], zeros[queries], assignments[queries])
    k = _lengthen(key[keys], of_keys[keys], zeros[keys])
    call = Call(Rows.single(length - start, length - gap, query.device), scale)
    dq, dk, _ = kernel.backward(grad[queries], q, k, value[keys], without_groups[queries], lse, call)
    first = slice(head_dim, head_dim + num_groups)
    second = slice(first.stop, first.stop + num_groups)
    credit[queries] += dq[..., first].sum(dim=1, dtype=credit.dtype) / scale
    from_keys = dk[..., second].sum(dim=1, dtype=credit.dtype) / scale
    from_keys[: pattern.sink_tokens] = 0.0
    credit[keys] += from_keys
    return credit


def _lengthen(states: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """``(T, H, D)`` with two times ``K`` columns behind each head, and zeros up to a multiple of 8."""
    width = -(states.shape[-1] + 2 * first.shape[-1]) % 8
    columns = F.pad(torch.cat([first, second], dim=-1).to(states.dtype), (0, width))
    return torch.cat([states, columns[:, None].expand(-1, states.shape[1], -1)], dim=-1)


def _spelled_out(
    grad: Tensor,
    without_groups: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    assignments: Tensor,
    sink_logits: Tensor | None,
    pattern: Pattern,
    positions: Tensor,
    documents: Tensor | None,
    extra_mask: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """``(B, T, K)``, some queries at a time."""
    key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
    dtype = assignments.dtype
    credit = torch.zeros_like(assignments)
    for start in range(0, query.shape[2], QUERY_CHUNK):
        rows, columns = slice(start, start + QUERY_CHUNK), slice(0, start + QUERY_CHUNK)
        allowed, distant = training_pairs(pattern, positions, rows, columns, documents, extra_mask)
        scores = torch.matmul(query[:, :, rows], key[:, :, columns].transpose(-1, -2)).to(dtype) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~allowed, float("-inf"))
        lse = torch.logsumexp(scores, dim=-1, keepdim=True)
        if sink_logits is not None:
            lse = torch.logaddexp(lse, sink_logits.to(dtype)[None, :, None, None])
        weights = torch.exp(scores - lse).masked_fill(~(allowed & distant[:, None]), 0.0)
        do, alone = grad[:, :, rows].to(dtype), without_groups[:, :, rows].to(dtype)
        gain = torch.matmul(do, value[:, :, columns].to(dtype).transpose(-1, -2)) - (do * alone).sum(-1, keepdim=True)
        pairs = (weights * gain).sum(dim=1)
        credit[:, rows] += pairs @ assignments[:, columns]
        credit[:, columns] += pairs.transpose(-1, -2) @ assignments[:, rows]
    return credit
