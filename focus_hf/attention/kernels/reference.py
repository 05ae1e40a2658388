"""The protocol spelled out, row by row, in plain torch: slow, and right on every device."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Call, Gradients, Kernel, Result


class Reference(Kernel):
    """Builds every score. What other backends are held to, and what runs where there is no other."""

    name = "reference"
    one_row_at_a_time = True

    def missing(self) -> str | None:
        return None

    def unsupported(self, query: Tensor, value: Tensor) -> str | None:
        return None

    def _forward(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Result:
        scores = _scores(query, key, call)
        lse = scores.logsumexp(dim=-1)
        weights = (scores - lse[..., None]).exp()
        output = torch.einsum("grqs,sgd->qgrd", weights, value.to(weights.dtype))
        return output.flatten(1, 2).to(query.dtype), lse.flatten(0, 1).T

    def _backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, call: Call
    ) -> Gradients:
        scores = _scores(query, key, call)
        dtype, kv_heads = scores.dtype, key.shape[1]
        q, g, o = (x.unflatten(1, (kv_heads, -1)).to(dtype) for x in (query, grad, output))
        weights = (scores - lse.T.unflatten(0, (kv_heads, -1))[..., None]).exp()
        dv = torch.einsum("grqs,qgrd->sgd", weights, g)
        # The softmax's own term, (gradient . output), is that of the whole attention.
        d_weights = torch.einsum("qgrd,sgd->grqs", g, value.to(dtype))
        d_scores = weights * (d_weights - (g * o).sum(dim=-1).permute(1, 2, 0)[..., None]) * call.scale
        dq = torch.einsum("grqs,sgd->qgrd", d_scores, key.to(dtype)).flatten(1, 2)
        dk = torch.einsum("grqs,qgrd->sgd", d_scores, q)
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)


def _scores(query: Tensor, key: Tensor, call: Call) -> Tensor:
    """Masked scores ``(H_kv, H / H_kv, Q, S)``, at least float32; pairs left out have the lowest finite number."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    q = query.unflatten(1, (key.shape[1], -1)).to(dtype)
    scores = torch.einsum("qgrd,sgd->grqs", q, key.to(dtype)) * call.scale
    num_queries, num_keys = query.shape[0], key.shape[0]
    i = torch.arange(num_keys - num_queries, num_keys, device=query.device)[:, None]
    j = torch.arange(num_keys, device=query.device)
    left_out = torch.zeros(num_queries, num_keys, dtype=torch.bool, device=query.device)
    if call.causal:
        left_out |= j > i
    if call.window is not None:
        left_out |= i - j > call.window
    return scores.masked_fill(left_out, torch.finfo(dtype).min / 2)
