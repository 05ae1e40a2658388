"""The attention function and mask function that transformers calls under the name "focus"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, flash_attention_mask, sdpa_mask

from ..attention import (
    HARD_GATE,
    PADDING,
    Kernel,
    Pattern,
    find_kernel,
    focus_attention,
    gated_attention,
    grouped_focus_attention,
    masked_attention,
)
from .cache import append_memberships, attend_stores, can_store_by_groups, store_by_groups


@dataclass(frozen=True)
class SoftGate:
    """What training adds to a routing: assignments ``(B, T, K)`` with a gradient, and the gate they drive."""

    assignments: Tensor
    name: str
    strength: float


@dataclass(frozen=True)
class Routing:
    """What an attention call needs to know about groups.

    Args:
        pattern: window, sinks, dense start.
        memberships: bool ``(B, tokens seen, K)``, cached tokens included; of the new tokens only if ``in_stores``.
        top_k: groups per token.
        path: a name in `focus_hf.attention.PATHS`.
        kernel: the backend; ``None`` for the best one.
        soft: set in training.
        cache_layer: where the tokens are cached, if they are.
        in_stores: the cache layer is stored by groups.
        owner: the adapter.
    """

    pattern: Pattern
    memberships: Tensor
    top_k: int
    path: str = "auto"
    kernel: Kernel | None = None
    soft: SoftGate | None = None
    cache_layer: Any = None
    in_stores: bool = False
    owner: object = None


class RoutedConfig:
    """An attention module's own config for the length of one call, naming our function and carrying the routing.

    The attention interface passes no hidden states, but it does pass the module; the base model's config, and with
    it the way masks are made, stays as it is.
    """

    _attn_implementation = "focus"

    def __init__(self, config: Any, routing: Routing) -> None:
        self.original = config
        self.routing = routing

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


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

    Returns:
        ``(B, Q, H, D_v)``, and ``None`` for the attention weights, which are never built.

    Raises:
        NotImplementedError: the model passes something that Focus cannot honour (position biases, flex masks).
    """
    if kwargs.get("position_bias") is not None:
        raise NotImplementedError("Focus does not support models with additive position biases (such as T5).")
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        raise NotImplementedError(
            f"Focus cannot read a {type(attention_mask).__name__} mask. Load the base model with "
            'attn_implementation="sdpa" (or "focus") instead of "flex_attention".'
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    routing = getattr(module.config, "routing", None) if isinstance(module.config, RoutedConfig) else None
    if routing is None:
        return _dense(module, query, key, value, attention_mask, scale, dropout, softcap, s_aux, kwargs)

    is_sliding = kwargs.get("sliding_window") is not None
    if routing.soft is not None:
        output = _soft_attention(routing, query, key, value, attention_mask, scale, softcap, s_aux, dropout)
    else:
        output = _hard_attention(
            routing, query, key, value, attention_mask, scale, softcap, s_aux, dropout, is_sliding=is_sliding
        )
    return output.transpose(1, 2).contiguous(), None


def _soft_attention(
    routing: Routing,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    s_aux: Tensor | None,
    dropout: float,
) -> Tensor:
    """Training: ``(B, H, T, D)`` each."""
    assert routing.soft is not None
    positions, documents, extra_mask = read_mask(mask, query.shape, key.shape[2], query.device)
    if routing.soft.name == HARD_GATE:
        if extra_mask is not None or softcap is not None or dropout != 0.0:
            raise NotImplementedError(
                'FocusConfig.gate="hard" cannot train through soft-capping, attention dropout or sliding windows. Use '
                'gate="additive".'
            )
        return grouped_focus_attention(
            query,
            key,
            value,
            routing.pattern,
            positions,
            routing.memberships,
            scale,
            documents=documents,
            sink_logits=s_aux,
            assignments=routing.soft.assignments,
            strength=routing.soft.strength,
            kernel=routing.kernel,
        )
    return gated_attention(
        query,
        key,
        value,
        routing.pattern,
        positions,
        routing.soft.assignments,
        scale,
        gate=routing.soft.name,
        strength=routing.soft.strength,
        documents=documents,
        extra_mask=extra_mask,
        softcap=softcap,
        sink_logits=s_aux,
        dropout=dropout,
    )


def _hard_attention(
    routing: Routing,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    s_aux: Tensor | None,
    dropout: float,
    *,
    is_sliding: bool,
) -> Tensor:
    """Inference: ``(B, H, Q, D)`` against all keys, or against a cache layer that is stored by groups."""
    layer, memberships = routing.cache_layer, routing.memberships
    kernel = find_kernel(query, value) if routing.kernel is None else routing.kernel
    if (why := kernel.unsupported(query, value)) is not None:
        raise ValueError(
            f"kernel {kernel.name!r} cannot compute this attention: {why}. Choose another one, or 'auto', with "
            "focus_hf.set_routing(model, kernel=...)."
        )
    if routing.in_stores:
        total = layer.get_seq_length() + key.shape[2]
        positions, documents, extra_mask = read_mask(mask, query.shape, total, query.device)
        if extra_mask is None and documents is None and softcap is None and dropout == 0.0:
            output = attend_stores(layer, query, key, value, positions, memberships, scale, s_aux, kernel)
            if output is not None:
                return output
        layer.restore()
        memberships = append_memberships(layer, memberships, owner=routing.owner)
        key, value = layer.update(key, value)
    seen = memberships.shape[1]
    key, value, memberships, mask = _align(key, value, memberships, mask)
    dropped = seen - key.shape[2]
    positions, documents, extra_mask = read_mask(
        mask, query.shape, key.shape[2], query.device, dropped=dropped, is_sliding=is_sliding
    )
    output = focus_attention(
        query,
        key,
        value,
        routing.pattern,
        positions,
        memberships,
        scale,
        documents=documents,
        extra_mask=extra_mask,
        softcap=softcap,
        sink_logits=s_aux,
        dropout=dropout,
        path=routing.path,
        kernel=kernel,
    )
    plain = extra_mask is None and documents is None and softcap is None
    fast = plain and routing.path in ("auto", "grouped") and not output.requires_grad
    if layer is not None and fast and can_store_by_groups(layer, memberships.shape[-1], routing.top_k):
        store_by_groups(layer, routing.pattern, positions)
    return output


def _align(
    key: Tensor, value: Tensor, memberships: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Make keys, memberships and mask cover the same tokens.

    A static cache returns unused room after the tokens seen; a sliding one has dropped the oldest keys.
    """
    seen = memberships.shape[1]
    if key.shape[2] > seen:
        key, value = key[:, :, :seen], value[:, :, :seen]
        mask = mask[..., :seen] if mask is not None else None
    else:
        memberships = memberships[:, seen - key.shape[2] :]
        mask = mask[..., -key.shape[2] :] if mask is not None else None
    return key, value, memberships, mask


def read_mask(
    mask: Tensor | None,
    query_shape: torch.Size,
    num_keys: int,
    device: torch.device,
    *,
    dropped: int = 0,
    is_sliding: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Turn whatever mask the base model made into positions and documents, plus the mask itself if it says more.

    Args:
        mask: ``None``; ``(B, S)`` with 0 for padding; or ``(B, 1 or H, Q, S)``, bool or additive (0 = attend).
        query_shape: ``(B, H, Q, D)``; the queries are the last ``Q`` of the ``S`` tokens.
        num_keys: ``S``.
        device: of the tensors.
        dropped: older tokens that a sliding cache no longer holds.
        is_sliding: the mask is that of a sliding window.

    Returns:
        Positions ``(B, S)``: a token's rank among the tokens of its document, ``PADDING`` for padding. Documents
        ``(B, S)`` where several are packed into a row, else ``None``. And ``None`` where causality, padding and
        documents say it all, else the allowed pairs ``(B, 1 or H, Q, S)``.
    """
    batch, num_queries = query_shape[0], query_shape[2]
    index = torch.arange(num_keys, device=device)
    if mask is None:
        return (index + dropped).expand(batch, num_keys), None, None
    if mask.dim() == 2:
        return _positions(mask.bool(), dropped), None, None
    allowed = mask if mask.dtype == torch.bool else mask == 0
    allowed = allowed.expand(batch, -1, -1, -1)
    real = allowed[:, 0, -1]
    causal = _causal(num_queries, num_keys, device)
    if bool((allowed == (causal & real[:, None, None, :])).all()):
        return _positions(real, dropped), None, None
    if num_queries == num_keys and not is_sliding:
        # Packed documents: a token's position is the number of tokens it may look back at, itself excluded.
        positions = allowed[:, 0].sum(dim=-1) - 1
        documents = allowed[:, 0].int().argmax(dim=-1)  # the first token it may look back at
        real = positions != PADDING
        same = (documents[:, :, None] == documents[:, None, :]) & real[:, :, None] & real[:, None, :]
        ordered = bool((documents.cummax(dim=-1).values == documents)[real].all())
        if ordered and bool((allowed == (same & causal)[:, None]).all()):
            return positions, documents, None
        return positions, None, allowed
    return _positions(allowed[:, 0].any(dim=1), dropped), None, allowed


def _positions(real: Tensor, dropped: int) -> Tensor:
    return torch.where(real, real.cumsum(dim=-1) - 1 + dropped, PADDING)


def _causal(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """bool ``(Q, S)``: what the last ``Q`` of ``S`` tokens may look back at."""
    index = torch.arange(num_keys, device=device)
    return index[None, :] <= index[num_keys - num_queries :, None]


def _dense(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    dropout: float,
    softcap: float | None,
    s_aux: Tensor | None,
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
        mask = _causal(num_queries, num_keys, query.device)[None, None]
    if softcap is None and s_aux is None:
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scale, **kwargs)
    if mask is None:
        mask = _causal(num_queries, num_keys, query.device)[None, None]
    output = masked_attention(query, key, value, mask, scale, softcap=softcap, sink_logits=s_aux, dropout=dropout)
    return output.transpose(1, 2).contiguous(), None


def focus_mask(*args: Any, mask_function: Callable = causal_mask_function, **kwargs: Any) -> Tensor | None:
    """Mask function registered as ``"focus"``: the 2-D padding mask or ``None`` where that says it all.

    No ``T x T`` tensor is built for causal attention, padded or not. Other patterns (a sliding window, packed
    documents) come as SDPA's boolean mask.
    """
    make: Callable = flash_attention_mask if mask_function is causal_mask_function else sdpa_mask
    return make(*args, mask_function=mask_function, **kwargs)
