"""Soft Focus attention for training: gates on distant pairs instead of a hard mask, in memory linear in ``T``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..definition import dense_pairs, near_pairs
from ..masked import masked_attention
from ..problem import Problem

#: Queries handled together where scores are spelled out: ``B * H * QUERY_CHUNK * T`` of them at a time.
QUERY_CHUNK = 256


def gate_affinity(queries: Tensor, keys: Tensor) -> Tensor:
    """How much two tokens share a group: ``min(1, g_i . g_j)``.

    For distributions the product is at most 1 already; the bound matters for memberships in several groups,
    where any shared group counts once.

    Args:
        queries: assignments ``(B, Q, K)``.
        keys: assignments ``(B, S, K)``.

    Returns:
        ``(B, Q, S)``, in [0, 1].
    """
    product = torch.matmul(queries, keys.transpose(-1, -2))
    # Not clamp(): rounding can lift a pair of one group just above 1, and clamp() would then stop its gradient.
    return product - (product - 1.0).clamp(min=0.0).detach()


def gated_attention(problem: Problem, assignments: Tensor, *, gate: str, strength: float) -> Tensor:
    """Causal attention in which distant pairs are gated by their affinity; differentiable in ``assignments``.

    Local pairs (``i - j <= w``) and pairs with a sink are untouched. The gates:

    * ``"additive"``: the score of a distant pair gets ``-strength * (1 - affinity)``: 0 within a group, falling
      to ``-strength`` across groups. With a growing strength this becomes the hard mask.
    * ``"multiplicative"`` (paper, eq. 2): the score is multiplied by ``sigmoid(strength * affinity)``. It never
      removes a pair, so hard inference computes another function than this.

    Queries below ``dense_below`` are not gated, as in hard attention.

    Scores are spelled out for some queries at a time, and computed again in the backward pass.

    Args:
        problem: whole sequences, ``Q = S = T``. Its memberships do not matter here.
        assignments: ``(B, T, K)`` float, soft or straight-through.
        gate: a name in `GATES`.
        strength: ``lambda``, non-negative.

    Returns:
        ``(B, H, T, D_v)``; rows of padding are not defined.
    """
    who, scores = problem.who, problem.scores

    def some_queries(start: int, stop: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        rows, columns = slice(start, stop), slice(0, stop)
        distant = ~near_pairs(who, rows, columns)
        factor, bias = GATES[gate](gate_affinity(g[:, rows], g[:, columns]), distant, strength)
        return masked_attention(
            q,
            k[:, :, columns],
            v[:, :, columns],
            dense_pairs(who, rows, columns),
            scores.part(rows, columns).plus(None if bias is None else bias[:, None]),
            gate=None if factor is None else factor[:, None],
        )

    outputs = []
    length = problem.num_queries
    for start in range(0, length, QUERY_CHUNK):
        stop = min(start + QUERY_CHUNK, length)
        tensors = (problem.query[:, :, start:stop], problem.key, problem.value, assignments)
        arguments: tuple[Any, ...] = (start, stop, *tensors)
        again = torch.is_grad_enabled() and length > QUERY_CHUNK
        outputs.append(
            checkpoint(some_queries, *arguments, use_reentrant=False) if again else some_queries(*arguments)
        )
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _additive(affinity: Tensor, gated: Tensor, strength: float) -> tuple[Tensor | None, Tensor | None]:
    return None, torch.where(gated, strength * (affinity - 1.0), affinity.new_zeros(()))


def _multiplicative(affinity: Tensor, gated: Tensor, strength: float) -> tuple[Tensor | None, Tensor | None]:
    return torch.where(gated, torch.sigmoid(strength * affinity), affinity.new_ones(())), None


#: The gate that is no gate: hard attention forward, first-order gradients from all pairs (`credit_memberships`).
HARD_GATE = "hard"

#: The soft gates by name, as `FocusConfig.gate` gives them. From affinity and gated pairs ``(B, Q, S)`` and the
#: strength, each makes what is multiplied onto the scores and what is added to them.
GATES: dict[str, Callable[[Tensor, Tensor, float], tuple[Tensor | None, Tensor | None]]] = {
    "additive": _additive,
    "multiplicative": _multiplicative,
}
