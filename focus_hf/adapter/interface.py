"""The attention function that transformers calls under the name "focus"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..attention import Scores, masked_attention
from .attend import routed_attention
from .call import RoutedConfig, current
from .discovery import INDICES
from .engines.continuous import attend_pages
from .masks import Asked, added_to_scores, allowed_pairs, causal_mask


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
        return _dense(module, query, key, value, attention_mask, scores, kwargs)
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
        mask = (causal_mask(num_queries, seen, query.device) & mask.bool()[:, None])[:, None]
    elif mask is None and 1 < num_queries < num_keys:
        mask = causal_mask(num_queries, num_keys, query.device)[None, None]
    if scores.softcap is None and scores.sink_logits is None and scores.bias is None:
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=scores.dropout, scaling=scores.scale, **kwargs
        )
    if mask is None:
        mask = causal_mask(num_queries, num_keys, query.device)[None, None]
    output = masked_attention(query, key, value, allowed_pairs(mask), scores.plus(added_to_scores(mask)))
    return output.transpose(1, 2).contiguous(), None
