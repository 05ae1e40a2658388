"""The attention function that transformers calls under the name "focus".

Of a routed call its router is asked, and what it says is computed by the cheapest path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..attention import (
    HARD_GATE,
    Pattern,
    Problem,
    Scores,
    credit_memberships,
    find_kernel,
    focus_attention,
    gated_attention,
    kernel_named,
    masked_attention,
)
from ..ranks import GradientsOfAllParts, split_over
from .call import Call, RoutedConfig, current
from .discovery import INDICES
from .engines.continuous import attend_pages
from .masks import Asked, added_to_scores, allowed_pairs, causal_mask
from .observe import tell_attention, tell_routing
from .routers import route


def focus_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function registered with transformers as ``"focus"``.

    Args:
        module: the attention module; without a routed call of it (`call.current`) it gets dense attention.
        query: ``(B, H, Q, D)``.
        key: ``(B, H_kv, S, D)``; a static cache passes its whole buffer.
        value: ``(B, H_kv, S, D_v)``.
        attention_mask: ``None``, a padding mask ``(B, S)``, or a mask ``(B, 1, Q, S)``, bool or additive.
        scaling: factor on ``q . k``; ``D ** -0.5`` if ``None``.
        dropout: probability of dropping an attention weight.
        softcap: Gemma-2's soft-capping of the scores.
        s_aux: gpt-oss' learned sink logits, ``(H,)``.
        position_bias: added to the scores, ``(B or 1, H, Q, S)``.
        sinks: a sink logit for each query, ``(B, H, Q, 1)``.

    Returns:
        ``(B, Q, H, D_v)``, and ``None`` for the attention weights, which are never built.

    Raises:
        NotImplementedError: the model passes something that Focus cannot honour (indices, flex masks).
    """
    for name in INDICES:
        if kwargs.get(name) is not None:
            raise NotImplementedError("Focus does not route attention layers that choose their pairs by an index.")
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        raise NotImplementedError(
            f"Focus cannot read a {type(attention_mask).__name__} mask. Load the base model with "
            'attn_implementation="sdpa" (or "focus") instead of "flex_attention".'
        )
    scores = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux, dropout, position_bias)
    if sinks is not None:
        # A logit for each query, as the logit 0 beside scores that are less by it: the softmax is the same.
        scores = replace(scores.plus(-sinks), sink_logits=query.new_zeros(query.shape[1]))
    config: Any = module.config
    call = current(config.router) if isinstance(config, RoutedConfig) else None
    if call is None or call.dense:
        return _dense(module, (query, key, value), attention_mask, scores, kwargs)
    query, key, value = _under_autocast(query, key, value)
    if call.paged is not None:
        output = attend_pages(call, query, key, value, attention_mask, scores)
    else:
        is_sliding, seen = kwargs.get("sliding_window") is not None, call.seen + query.shape[2]
        output = routed_attention(call, Asked(query, key, value, attention_mask, scores, seen, is_sliding))
    return output.transpose(1, 2).contiguous(), None


def _under_autocast(*tensors: Tensor) -> Sequence[Tensor]:
    """In autocast's dtype, as PyTorch's own attention does it: rotary positions leave queries and keys in float32."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return [tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors]


def _dense(
    module: nn.Module, tensors: tuple[Tensor, ...], mask: Tensor | None, scores: Scores, kwargs: dict[str, Any]
) -> tuple[Tensor, None]:
    """Attention of an unrouted module in a model loaded with ``attn_implementation="focus"``: SDPA's."""
    query, key, value = tensors
    num_queries, num_keys = query.shape[2], key.shape[2]
    if mask is not None and mask.dim() == 2:
        seen = mask.shape[1]
        key, value = key[:, :, :seen], value[:, :, :seen]
        mask = (causal_mask(num_queries, seen, query.device) & mask.bool()[:, None])[:, None]
    is_plain = scores.softcap is None and scores.sink_logits is None and scores.bias is None
    if mask is None and (not is_plain or 1 < num_queries < num_keys):
        mask = causal_mask(num_queries, num_keys, query.device)[None, None]
    if mask is None or is_plain:
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=scores.dropout, scaling=scores.scale, **kwargs
        )
    output = masked_attention(query, key, value, allowed_pairs(mask), scores.plus(added_to_scores(mask)))
    return output.transpose(1, 2).contiguous(), None


def routed_attention(call: Call, asked: Asked) -> Tensor:
    """Attention of a call that is routed: ``(B, H, Q, D_v)``.

    Raises:
        ValueError: the kernel that was chosen cannot compute this.
    """
    router = call.router
    with torch.no_grad():
        routed = route(call, asked)
        if router.observer is not None and call.config.by_cells and not call.alone:
            tell_routing(call, asked.key, routed)
    if call.assignments is not None:
        return _soft(call, call.assignments, asked.problem(call.pattern, *routed))
    kernel = router.kernel
    if kernel is not None and (why := kernel.unsupported(asked.query, asked.value)) is not None:
        raise ValueError(
            f"kernel {kernel.name!r} cannot compute this attention: {why}. Choose another one, or 'auto', with "
            "focus_hf.set_routing(model, kernel=...)."
        )
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (asked.query, asked.key, asked.value))
    if torch.compiler.is_compiling() and not learns:
        scores, pattern = asked.scores, call.pattern
        tensors = (asked.query, asked.key, asked.value, asked.mask, *routed, scores.sink_logits, scores.bias)
        shape = (pattern.local_window, pattern.sink_tokens, pattern.dense_below)
        how = (scores.scale, scores.softcap, scores.dropout, asked.dropped, asked.is_sliding)
        name = (kernel or find_kernel(asked.query, asked.value)).name
        return _compiled(*tensors, *shape, *how, router.path, name).transpose(1, 2)
    problem = asked.problem(call.pattern, *routed)
    tell_attention(call, problem)
    return focus_attention(problem, path=router.path, kernel=kernel)


def _soft(call: Call, assignments: Tensor, problem: Problem) -> Tensor:
    """Training: ``(B, H, T, D_v)``."""
    router, config = call.router, call.config
    tell_attention(call, problem)
    parts = split_over(router.get_base_layer())
    if parts is not None:
        assignments = GradientsOfAllParts.apply(assignments, parts)
    if config.gate == HARD_GATE:
        output = focus_attention(problem, path="grouped", kernel=router.kernel)  # also where it is made again
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
