"""Masks: what a base model makes, read; and what it needs for attention called "focus", made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, flash_attention_mask, sdpa_mask

from ..attention import EVERY, PADDING, Known, Pattern, Problem, Scores, WhoAttends, count_up


def problem_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    pattern: Pattern,
    memberships: Tensor,
    scores: Scores,
    *,
    is_sliding: bool = False,
    groups_each: int | None = None,
) -> Problem:
    """The attention problem that a model poses with these tensors, under whatever mask it made.

    Args:
        query: ``(B, H, Q, D)``.
        key: ``(B, H_kv, S, D)``; a static cache returns unused room after the tokens seen, a sliding one has dropped
            the oldest.
        value: ``(B, H_kv, S, D_v)``.
        mask: see `read_mask`. What an additive one adds to the scores of pairs that it allows becomes part of their
            bias.
        pattern: window, sinks, dense start.
        memberships: ``(B, tokens seen, K)`` bool.
        scores: how they are made.
        is_sliding: the mask is that of a sliding window.
        groups_each: every token is in exactly this many groups; ``None`` if that is not known.
    """
    seen, dropped = memberships.shape[1], 0
    if key.shape[2] > seen:
        key, value = key[:, :, :seen], value[:, :, :seen]
        mask = mask[..., :seen] if mask is not None else None
        scores = scores.part(EVERY, slice(seen))
    elif key.shape[2] < seen or mask is not None or scores.bias is not None:
        dropped = seen - key.shape[2]
        memberships = memberships[:, dropped:]
        mask = mask[..., -key.shape[2] :] if mask is not None else None
        scores = scores.part(EVERY, slice(-key.shape[2], None))
    if (added := added_to_scores(mask)) is not None:
        scores = replace(scores, bias=added if scores.bias is None else scores.bias + added)
    positions, documents, extra_mask = read_mask(mask, query, key.shape[2], dropped=dropped, is_sliding=is_sliding)
    documents_each = 1 if documents is None else int((positions == 0).sum(dim=1).max())
    known = Known(groups_each, documents_each, unpadded=mask is None, first_position=dropped)
    who = WhoAttends(pattern, positions, memberships, documents, extra_mask, known=known)
    return Problem(query, key, value, who, scores)


def with_reads(problem: Problem, reads: Tensor | None) -> Problem:
    """The problem with the groups that its queries read, bool ``(B, Q, K)``; earlier tokens ask no more."""
    if reads is None:
        return problem
    earlier = reads.new_zeros(reads.shape[0], problem.num_keys - reads.shape[1], reads.shape[2])
    return replace(problem, who=replace(problem.who, reads=torch.cat([earlier, reads], dim=1)))


def read_mask(
    mask: Tensor | None,
    query: Tensor,
    num_keys: int,
    *,
    dropped: int = 0,
    is_sliding: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Turn whatever mask the base model made into positions and documents, plus the mask itself if it says more.

    Args:
        mask: ``None``; ``(B, S)`` with 0 for padding; or ``(B, 1 or H, Q, S)``, bool or additive (`allowed_pairs`).
        query: ``(B, H, Q, D)``, of the last ``Q`` of the ``S`` tokens.
        num_keys: ``S``.
        dropped: older tokens that a sliding cache no longer holds.
        is_sliding: the mask is that of a sliding window.

    Returns:
        Positions ``(B, S)``: a token's rank among the tokens of its document, ``PADDING`` for padding. Documents
        ``(B, S)`` where several are packed into a row, else ``None``. And ``None`` where causality, padding and
        documents say it all, else the allowed pairs ``(B, 1 or H, Q, S)``.
    """
    batch, num_queries = query.shape[0], query.shape[2]
    if mask is None:
        index = count_up(num_keys, like=query)
        return (index + dropped if dropped else index).expand(batch, num_keys), None, None
    if mask.dim() == 2:
        return _positions(mask.bool(), dropped), None, None
    allowed = allowed_pairs(mask).expand(batch, -1, -1, -1)
    real = allowed[:, 0, -1]
    causal = causal_mask(num_queries, num_keys, query.device)
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


def allowed_pairs(mask: Tensor) -> Tensor:
    """The pairs that a mask ``(B, 1 or H, Q, S)`` allows, bool: of an additive one those that it does not hide."""
    return mask if mask.dtype == torch.bool else mask > _HIDDEN


def added_to_scores(mask: Tensor | None) -> Tensor | None:
    """What an additive mask adds to the scores of pairs that it allows; ``None`` if nothing."""
    if mask is None or mask.dim() != 4 or not mask.is_floating_point():
        return None
    allowed = allowed_pairs(mask)
    if not bool((mask.ne(0) & allowed).any()):  # a third of the time that it takes to fill a copy, in every layer
        return None
    return mask.masked_fill(~allowed, 0.0)


#: An additive mask hides a pair by a number as small as this: no score makes up for it.
_HIDDEN = -1e4


def valid_tokens(mask: Any) -> Tensor | None:
    """bool ``(B, T)``, ``False`` for padding, or ``None`` if nothing is known to be padding."""
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        return None
    if mask.dim() == 4:
        mask = allowed_pairs(mask)[:, 0, -1]
    return mask.bool()


def causal_mask(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """bool ``(Q, S)``: what the last ``Q`` of ``S`` tokens may look back at."""
    index = torch.arange(num_keys, device=device)
    return index[None, :] <= index[num_keys - num_queries :, None]


def focus_mask(*args: Any, mask_function: Callable = causal_mask_function, **kwargs: Any) -> Tensor | None:
    """Mask function registered as ``"focus"``: the 2-D padding mask or ``None`` where that says it all.

    No ``T x T`` tensor is built for causal attention, padded or not. Other patterns (a sliding window, packed
    documents) come as SDPA's boolean mask.
    """
    make: Callable = flash_attention_mask if mask_function is causal_mask_function else sdpa_mask
    padding = kwargs.get("attention_mask")
    if make is flash_attention_mask and padding is not None and torch.compiler.is_compiling():
        return padding[:, -kwargs["kv_length"] :]  # a graph cannot depend on whether there is padding
    return make(*args, mask_function=mask_function, **kwargs)
