"""The attention function that transformers calls under the name "focus"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..attention import (
    HARD_GATE,
    Kernel,
    Problem,
    Scores,
    credit_memberships,
    focus_attention,
    gated_attention,
    masked_attention,
)
from ..ranks import GradientsOfAllParts, several, split_over
from .call import OneTokenRouting, RoutedConfig, Routing, SoftGate
from .continuous import attend_pages
from .discovery import INDICES
from .hard import attend_new_token, hard_attention
from .heads import classes_of_part
from .masks import added_to_scores, allowed_pairs, causal_mask, problem_of


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
        module: the attention module; its config is a `RoutedConfig` while it is routed, otherwise it gets dense
            attention.
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
    routing = module.config.routing if isinstance(module.config, RoutedConfig) else None
    if isinstance(routing, OneTokenRouting):
        more = attention_mask is not None or softcap is not None or s_aux is not None or sinks is not None
        if not more and position_bias is None and not dropout:
            output = attend_new_token(routing, _under_autocast(query, key, value), scaling)
            if output is not None:
                return output.transpose(1, 2).contiguous(), None
        routing = routing.spelled_out()
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        raise NotImplementedError(
            f"Focus cannot read a {type(attention_mask).__name__} mask. Load the base model with "
            'attn_implementation="sdpa" (or "focus") instead of "flex_attention".'
        )
    scores = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux, dropout, position_bias)
    if sinks is not None:
        scores = _with_sinks(scores, sinks, query)
    if routing is None:
        return _dense(module, query, key, value, attention_mask, scores, kwargs)

    query, key, value = _under_autocast(query, key, value)
    if several():
        routing = _of_part(routing, key.shape[1], split_over(module))
    if routing.attention_observer is not None:
        routing.attention_observer(query, key, scores.scale, routing.memberships)
    is_sliding = kwargs.get("sliding_window") is not None
    if routing.paged is not None:
        if scores.bias is not None or routing.paged.packed.adds_to_scores(attention_mask):
            raise ValueError("Focus in continuous batching does not route layers that add a bias to their scores.")
        output = attend_pages(routing, query, key, value, scores)
    elif routing.soft is not None:
        problem = problem_of(
            *(query, key, value, attention_mask, routing.pattern, routing.memberships, scores),
            groups_each=routing.groups_each,
        )
        output = _soft_attention(problem, routing.soft, routing.kernel)
    else:
        output = hard_attention(routing, query, key, value, attention_mask, scores, is_sliding=is_sliding)
    return output.transpose(1, 2).contiguous(), None


def _of_part(routing: Routing, key_heads: int, parts: DeviceMesh | None) -> Routing:
    """The routing of a layer whose heads may be split over several processes, for those of this one.

    Raises:
        ValueError: the call needs all heads, or it is not known which ones are here.
    """
    if parts is not None and routing.attention_observer is not None:
        raise ValueError(
            "Under tensor parallelism attention cannot be observed: each process sees its own heads only. Load the "
            "model without tp_plan."
        )
    if parts is not None and routing.soft is not None:
        assignments = GradientsOfAllParts.apply(routing.soft.assignments, parts)
        return replace(routing, soft=replace(routing.soft, assignments=assignments))
    if routing.classes is None:
        return routing
    part = None if parts is None else (parts.get_local_rank(), parts.size())
    # What `route` knows of a stored layer is all heads: it stays plain where they are split.
    layer = routing.cache_layer if parts is None else None
    return replace(routing, classes=classes_of_part(routing.classes, key_heads, part), cache_layer=layer)


def _with_sinks(scores: Scores, sinks: Tensor, query: Tensor) -> Scores:
    """A sink logit for each query, as the logit 0 beside scores that are less by it: the softmax is the same."""
    bias = -sinks if scores.bias is None else scores.bias - sinks
    return replace(scores, bias=bias, sink_logits=query.new_zeros(query.shape[1]))


def _under_autocast(*tensors: Tensor) -> Sequence[Tensor]:
    """In autocast's dtype, as PyTorch's own attention does it: rotary positions leave queries and keys in float32."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return [tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors]


def _soft_attention(problem: Problem, soft: SoftGate, kernel: Kernel | None) -> Tensor:
    """Training: ``(B, H, T, D_v)``."""
    if soft.name == HARD_GATE:
        output = focus_attention(problem, kernel=kernel)
        return credit_memberships(output, soft.assignments, problem, kernel=kernel)
    return gated_attention(problem, soft.assignments, gate=soft.name, strength=soft.strength)


def _dense(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scores: Scores,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    """Attention of an unrouted module in a model loaded with ``attn_implementation="focus"``: SDPA's."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    if mask is not None and mask.dim() == 2:
        seen = mask.shape[1]
        key, value = key[:, :, :seen], value[:, :, :seen]
        mask = sdpa_mask(
            batch_size=query.shape[0],
            q_length=num_queries,
            kv_length=seen,
            q_offset=seen - num_queries,
            attention_mask=mask.bool(),
            allow_is_causal_skip=False,
            device=query.device,
        )
    elif mask is None and 1 < num_queries < num_keys:
        mask = causal_mask(num_queries, num_keys, query.device)[None, None]
    if scores.softcap is None and scores.sink_logits is None and scores.bias is None:
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=scores.dropout, scaling=scores.scale, **kwargs
        )
    if mask is None:
        mask = causal_mask(num_queries, num_keys, query.device)[None, None]
    if (added := added_to_scores(mask)) is not None:
        scores = replace(scores, bias=added if scores.bias is None else scores.bias + added)
    output = masked_attention(query, key, value, allowed_pairs(mask), scores)
    return output.transpose(1, 2).contiguous(), None
