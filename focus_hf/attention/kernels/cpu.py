"""The flash kernel that every CPU build of PyTorch carries."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..definition import share_a_group
from .base import Call, Gradients, Kernel, Result, merge, pad_heads

#: Queries per block of a sliding window; small blocks waste few keys outside the window.
WINDOW_BLOCK = 32

#: Earlier keys, as a share of the queries, up to which one call with more queries is cheaper than two calls.
_FEW = 0.25


class CpuFlash(Kernel):
    """``aten::_scaled_dot_product_flash_attention_for_cpu``.

    It aligns causal attention at the top left, wants values as wide as keys, crashes the process on empty input, and
    gives a row that is masked by ``-inf`` throughout a logsumexp of 0; all of that is handled here.
    """

    name = "cpu-flash"
    one_row_at_a_time = True

    def missing(self) -> str | None:
        available = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
        return None if available else "this build of PyTorch has no CPU flash kernel"

    def unsupported(self, query: Tensor, value: Tensor) -> str | None:
        if query.device.type != "cpu":
            return "runs on CPU only"
        return "values are wider than keys" if value.shape[-1] > query.shape[-1] else None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Result:
        if call.window is None:
            return super().forward(query, key, value, call)
        # A band in blocks of queries; excluded pairs cost nothing in its mask.
        q, k, v, bias = _blocks(query, key, value, call, call.window)
        output, lse = cpu_flash(q, k, v, call.scale, bias=bias)
        length = query.shape[0]
        return output.flatten(0, 1)[:length], lse.flatten(0, 1)[:length]

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, call: Call
    ) -> Gradients:
        if call.window is None:
            return super().backward(grad, query, key, value, output, lse, call)
        leaves = query.detach().requires_grad_(), key.detach().requires_grad_(), value.detach().requires_grad_()
        with torch.enable_grad():  # blocks overlap: autograd knows how their gradients add up
            q, k, v, bias = _blocks(*leaves, call, call.window)
        tail = -query.shape[0] % WINDOW_BLOCK
        g, o, log = (_pad_tokens(x, 0, tail).unflatten(0, (-1, WINDOW_BLOCK)) for x in (grad, output, lse))
        gradients = _cpu_flash_backward(g, q.detach(), k.detach(), v.detach(), o, log, call.scale, bias=bias)
        dq, dk, dv = torch.autograd.grad((q, k, v), leaves, gradients)
        return dq, dk, dv

    def _forward(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Result:
        if not call.causal:
            return cpu_flash(query, key, value, call.scale)
        earlier = key.shape[0] - query.shape[0]
        if 0 < earlier <= _FEW * query.shape[0]:  # as if those tokens asked, too
            output, lse = cpu_flash(_asking(query, earlier), key, value, call.scale, causal=True)
            return output[earlier:], lse[earlier:]
        result = cpu_flash(query, key[earlier:], value[earlier:], call.scale, causal=True)
        if earlier:
            before = cpu_flash(query, key[:earlier], value[:earlier], call.scale)
            output, lse = merge(*before, *result)
            return output.to(query.dtype), lse
        return result

    def _backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, call: Call
    ) -> Gradients:
        if not call.causal:
            return _cpu_flash_backward(grad, query, key, value, output, lse, call.scale)
        earlier = key.shape[0] - query.shape[0]
        if 0 < earlier <= _FEW * query.shape[0]:  # no gradient comes from those
            grad, query, output, lse = (_asking(x, earlier) for x in (grad, query, output, lse))
            dq, dk, dv = _cpu_flash_backward(grad, query, key, value, output, lse, call.scale, causal=True)
            return dq[earlier:], dk, dv
        new, old = slice(earlier, None), slice(0, earlier)
        dq, dk, dv = _cpu_flash_backward(grad, query, key[new], value[new], output, lse, call.scale, causal=True)
        if earlier:
            dq_old, dk_old, dv_old = _cpu_flash_backward(grad, query, key[old], value[old], output, lse, call.scale)
            return dq + dq_old, torch.cat([dk_old, dk]), torch.cat([dv_old, dv])
        return dq, dk, dv


def _asking(tokens: Tensor, earlier: int) -> Tensor:
    """So many zeros before the rows of queries."""
    return torch.cat([tokens.new_zeros(earlier, *tokens.shape[1:]), tokens])


def cpu_flash(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool = False, bias: Tensor | None = None
) -> Result:
    """The kernel itself, token-major.

    Args:
        query: ``(..., Tq, H, D)`` with at most one leading dimension; ``Tq >= 1``.
        key: ``(..., Tk, H_kv, D)``, ``Tk >= 1``; heads are not copied for grouped-query attention.
        value: ``(..., Tk, H_kv, D_v)``, ``D_v <= D``.
        scale: factor on ``q . k``.
        causal: query ``m`` sees keys ``0 .. m`` (top-left aligned).
        bias: added to the scores, broadcastable to ``(N, H, Tq, Tk)``; mask with a large finite number.

    Returns:
        Output ``(..., Tq, H, D_v)`` and logsumexp ``(..., Tq, H)``.
    """
    batched = query.dim() == 4
    q, k, v = ((x if batched else x[None]).transpose(1, 2) for x in (query, key, pad_heads(value, key.shape[-1])))
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=bias, scale=scale
    )
    output, lse = output.transpose(1, 2)[..., : value.shape[-1]], lse.transpose(1, 2)
    return (output, lse) if batched else (output[0], lse[0])


def _cpu_flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    scale: float,
    *,
    causal: bool = False,
    bias: Tensor | None = None,
) -> Gradients:
    """Backward of `cpu_flash`; ``output`` and ``lse`` may be those of a larger set of keys."""
    batched, head_dim = query.dim() == 4, query.shape[-1]
    tensors = (pad_heads(grad, head_dim), query, key, pad_heads(value, head_dim), pad_heads(output, head_dim), lse)
    g, q, k, v, o, log = ((x if batched else x[None]).transpose(1, 2) for x in tensors)
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        g, q, k, v, o.to(q.dtype), log, 0.0, causal, attn_mask=bias, scale=scale
    )
    dq, dk, dv = (x.transpose(1, 2) if batched else x.transpose(1, 2)[0] for x in gradients)
    return dq, dk, dv[..., : value.shape[-1]]


def _blocks(
    query: Tensor, key: Tensor, value: Tensor, call: Call, window: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries ``(n, block, H, D)``, keys and values ``(n, window + block, H_kv, D)``, bias ``(n, 1, block, ...)``.

    Each block sees the ``window`` keys before it and its own. The keys of the blocks are overlapping views of one
    padded tensor: nothing is copied per block.
    """
    earlier = key.shape[0] - query.shape[0]
    before, first = max(0, window - earlier), max(0, earlier - window)  # keys to make up; the first that is seen
    num_blocks = -(-query.shape[0] // WINDOW_BLOCK)
    tail, span = num_blocks * WINDOW_BLOCK - query.shape[0], window + WINDOW_BLOCK

    def spans(tokens: Tensor) -> Tensor:
        padded = _pad_tokens(tokens[first:], before, tail)
        return padded.unfold(0, span, WINDOW_BLOCK).movedim(-1, 1)

    i = torch.arange(WINDOW_BLOCK)[:, None] + window
    j = torch.arange(span)
    allowed = (j <= i) & (i - j <= window)
    if before:
        made_up = torch.arange(num_blocks)[:, None] * WINDOW_BLOCK + j < before
        allowed = allowed & ~made_up[:, None]
    if call.exclude is not None:
        q_columns = _pad_tokens(call.exclude[0], 0, tail).unflatten(0, (num_blocks, WINDOW_BLOCK))
        allowed = allowed & ~share_a_group(q_columns, spans(call.exclude[1]))
    lowest = torch.tensor(torch.finfo(query.dtype).min, dtype=query.dtype)
    bias = torch.where(allowed, torch.zeros((), dtype=query.dtype), lowest)
    blocks = _pad_tokens(query, 0, tail).unflatten(0, (num_blocks, WINDOW_BLOCK))
    return blocks, spans(key), spans(value), (bias if bias.dim() == 3 else bias[None])[:, None]


def _pad_tokens(tokens: Tensor, before: int, after: int) -> Tensor:
    return F.pad(tokens, (0, 0) * (tokens.dim() - 1) + (before, after)) if before or after else tokens
