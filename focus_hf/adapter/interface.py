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
    PADDING,
    Pattern,
    cpu_flash_available,
    gated_attention,
    grouped_focus_attention,
    masked_attention,
    masked_focus_attention,
)

#: Below this many tokens the masked path is as fast as the grouped one.
GROUPED_MIN_TOKENS = 512

BACKENDS = ("auto", "grouped", "masked")


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
        pattern: window and sinks.
        memberships: ``(B, tokens seen, K)`` bool, cached tokens included.
        backend: a name in `BACKENDS`.
        soft: set in training.
    """

    pattern: Pattern
    memberships: Tensor
    backend: str = "auto"
    soft: SoftGate | None = None


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

    key, value, memberships, attention_mask = _align(key, value, routing.memberships, attention_mask)
    dropped = routing.memberships.shape[1] - key.shape[2]
    is_sliding = kwargs.get("sliding_window") is not None
    positions, extra_mask = read_mask(attention_mask, query, key, dropped=dropped, is_sliding=is_sliding)
    if routing.soft is not None:
        output = gated_attention(
            query,
            key,
            value,
            routing.pattern,
            positions,
            routing.soft.assignments,
            scale,
            gate=routing.soft.name,
            strength=routing.soft.strength,
            extra_mask=extra_mask,
            softcap=softcap,
            sink_logits=s_aux,
            dropout=dropout,
        )
    elif _use_grouped(routing.backend, query, key, value, extra_mask, dropout, softcap, s_aux):
        output = grouped_focus_attention(query, key, value, routing.pattern, positions, memberships, scale)
    else:
        output = masked_focus_attention(
            query,
            key,
            value,
            routing.pattern,
            positions,
            memberships,
            scale,
            extra_mask=extra_mask,
            softcap=softcap,
            sink_logits=s_aux,
            dropout=dropout,
        )
    return output.transpose(1, 2).contiguous(), None


def _use_grouped(
    backend: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    extra_mask: Tensor | None,
    dropout: float,
    softcap: float | None,
    s_aux: Tensor | None,
) -> bool:
    """Whether the fast path computes this call; it covers inference over whole sequences on CPU."""
    if backend == "masked":
        return False
    able = (
        cpu_flash_available(query)
        and query.shape[2] == key.shape[2]
        and value.shape[-1] <= query.shape[-1]
        and extra_mask is None
        and softcap is None
        and s_aux is None
        and dropout == 0.0
        and not (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
    )
    return able and (backend == "grouped" or query.shape[2] >= GROUPED_MIN_TOKENS)


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
    mask: Tensor | None, query: Tensor, key: Tensor, *, dropped: int = 0, is_sliding: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Turn whatever mask the base model made into positions, plus the mask itself if it says more than that.

    Args:
        mask: ``None``; ``(B, S)`` with 0 for padding; or ``(B, 1 or H, Q, S)``, bool or additive (0 = attend).
        query: ``(B, H, Q, D)``; the queries are the last ``Q`` of the ``S`` tokens.
        key: ``(B, H_kv, S, D)``.
        dropped: older tokens that a sliding cache no longer holds.
        is_sliding: the mask is that of a sliding window.

    Returns:
        Positions ``(B, S)``: a token's rank among the tokens of its sequence, ``PADDING`` for padding; and
        ``None`` where causality and padding say it all, else the allowed pairs ``(B, 1 or H, Q, S)``.
    """
    batch, num_queries, num_keys = query.shape[0], query.shape[2], key.shape[2]
    index = torch.arange(num_keys, device=query.device)
    if mask is None:
        return (index + dropped).expand(batch, num_keys), None
    if mask.dim() == 2:
        return _positions(mask.bool(), dropped), None
    allowed = mask if mask.dtype == torch.bool else mask == 0
    allowed = allowed.expand(batch, -1, -1, -1)
    real = allowed[:, 0, -1]
    causal = _causal(num_queries, num_keys, query.device)
    if bool((allowed == (causal & real[:, None, None, :])).all()):
        return _positions(real, dropped), None
    if num_queries == num_keys and not is_sliding:
        # Packed documents: a token's position is the number of tokens it may look back at, itself excluded.
        return allowed[:, 0].sum(dim=-1) - 1, allowed
    return _positions(allowed[:, 0].any(dim=1), dropped), allowed


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
