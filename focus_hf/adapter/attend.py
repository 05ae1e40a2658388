"""Attention of a routed call: its router is asked, and what it says is computed by the cheapest path."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention import (
    HARD_GATE,
    Kernel,
    Pattern,
    Problem,
    Scores,
    credit_memberships,
    find_kernel,
    focus_attention,
    gated_attention,
    kernel_named,
)
from ..ranks import GradientsOfAllParts, several, split_over
from .call import Call
from .masks import Asked
from .observe import tell_attention, tell_routing
from .routers import route


def routed_attention(call: Call, asked: Asked) -> Tensor:
    """Attention of a call that is routed.

    Args:
        call: of the module.
        asked: what the model asks for.

    Returns:
        ``(B, H, Q, D_v)``.

    Raises:
        ValueError: the kernel asked for cannot compute this.
    """
    router = call.router
    with torch.no_grad():
        routed = route(call, asked)
        if router.observer is not None and call.config.by_cells and not call.alone:
            tell_routing(call, asked.key, routed)
    if call.assignments is not None:
        return _soft(call, call.assignments, asked.problem(call.pattern, *routed))
    kernel = _kernel(router.kernel, asked)
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (asked.query, asked.key, asked.value))
    if torch.compiler.is_compiling() and not learns:
        scores, pattern = asked.scores, call.pattern
        tensors = (asked.query, asked.key, asked.value, asked.mask, *routed, scores.sink_logits, scores.bias)
        shape = (pattern.local_window, pattern.sink_tokens, pattern.dense_below)
        how = (scores.scale, scores.softcap, scores.dropout, asked.dropped, asked.is_sliding)
        return _compiled(*tensors, *shape, *how, router.path, kernel.name).transpose(1, 2)
    problem = asked.problem(call.pattern, *routed)
    tell_attention(call, problem)
    return focus_attention(problem, path=router.path, kernel=kernel)


def _kernel(named: Kernel | None, asked: Asked) -> Kernel:
    if named is None:
        return find_kernel(asked.query, asked.value)
    if (why := named.unsupported(asked.query, asked.value)) is not None:
        raise ValueError(
            f"kernel {named.name!r} cannot compute this attention: {why}. Choose another one, or 'auto', with "
            "focus_hf.set_routing(model, kernel=...)."
        )
    return named


def _soft(call: Call, assignments: Tensor, problem: Problem) -> Tensor:
    """Training: ``(B, H, T, D_v)``."""
    router, config = call.router, call.config
    tell_attention(call, problem)
    parts = split_over(router.get_base_layer()) if several() else None
    if parts is not None:
        assignments = GradientsOfAllParts.apply(assignments, parts)
    if config.gate == HARD_GATE:
        output = focus_attention(problem, kernel=router.kernel)
        return credit_memberships(output, assignments, problem, kernel=router.kernel)
    strength = config.gate_strength if router.gate_strength is None else router.gate_strength
    return gated_attention(problem, assignments, gate=config.gate, strength=strength)


# Which tokens meet depends on the data, which torch.compile cannot trace and a CUDA graph cannot record: to both, the
# attention of a call is one opaque operation.
@torch.library.custom_op("focus_hf::hard_attention", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _compiled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    groups: Tensor,
    reads: Tensor,
    memberships: Tensor | None,
    s_aux: Tensor | None,
    bias: Tensor | None,
    local_window: int,
    sink_tokens: int,
    dense_below: int,
    scale: float,
    softcap: float | None,
    dropout: float,
    dropped: int,
    is_sliding: bool,
    path: str,
    kernel: str,
) -> Tensor:
    """`focus_attention` under the model's mask, as an operation: ``(B, Q, H, D_v)``, contiguous."""
    scores = Scores(scale, softcap, s_aux, dropout, bias)
    asked = Asked(query, key, value, mask, scores, key.shape[2] + dropped, is_sliding)
    problem = asked.problem(Pattern(local_window, sink_tokens, dense_below), groups, reads, memberships)
    return focus_attention(problem, path=path, kernel=kernel_named(kernel)).transpose(1, 2).contiguous()


@_compiled.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    batch, heads, queries = query.shape[:3]
    return query.new_empty(batch, queries, heads, value.shape[-1])
