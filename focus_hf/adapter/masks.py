"""Masks: what a base model makes, read; and what it needs for attention called "focus", made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, flash_attention_mask, sdpa_mask

from ..attention import PADDING, Pattern, Problem, Scores, WhoAttends, of_all_heads
from ..attention.definition import EVERY


@dataclass
class Asked:
    """What a model asks attention for, cut to the tokens that there are: a static cache returns room after the tokens
    seen, a sliding one has dropped the oldest.
    """

    query: Tensor  #: ``(B, H, Q, D)``, of the last ``Q`` of the ``S`` tokens
    key: Tensor  #: ``(B, H_kv, S, D)``
    value: Tensor  #: ``(B, H_kv, S, D_v)``
    mask: Tensor | None  #: ``(B, S)`` with 0 for padding; or ``(B, 1 or H, Q, S)``, bool or additive (`allowed_pairs`)
    scores: Scores  #: how they are made
    seen: int  #: tokens so far, the new ones included
    is_sliding: bool = False  #: the mask is that of a sliding window

    def __post_init__(self) -> None:
        length = self.key.shape[2]
        held = slice(self.seen) if length > self.seen else slice(-length, None)
        if length > self.seen:
            self.key, self.value = self.key[:, :, held], self.value[:, :, held]
        if self.mask is not None:
            self.mask = self.mask[..., held]
        self.scores = self.scores.part(EVERY, held)
        #: Older tokens that a sliding cache no longer holds.
        self.dropped = self.seen - self.key.shape[2]
        #: Position of every row's first token, where it is known without looking that nothing is padding.
        self.first_position = self.dropped if self.mask is None else None

    def query_positions(self) -> Tensor:
        """Positions of the queries, as `problem` has them, without looking at any: int64 ``(B, Q)``."""
        num_queries, mask = self.query.shape[2], self.mask
        if mask is None or (mask.dim() == 4 and self.is_sliding):
            end = self.key.shape[2] + self.dropped
            return torch.arange(end - num_queries, end, device=self.query.device).expand(self.query.shape[0], -1)
        if mask.dim() == 2:
            return self._positions(mask.bool())[:, -num_queries:]
        positions = allowed_pairs(mask)[:, 0].sum(dim=-1) - 1 + self.dropped
        return positions.expand(self.query.shape[0], -1)

    def problem(self, pattern: Pattern, groups: Tensor, reads: Tensor, memberships: Tensor | None) -> Problem:
        """The attention problem that this is.

        What an additive mask adds to the scores of pairs that it allows becomes part of their bias.

        Args:
            pattern: window, sinks, dense start, bands.
            groups, reads, memberships: see `WhoAttends`; one head may stand for all.
        """
        scores, kv_heads = self.scores.plus(added_to_scores(self.mask)), self.key.shape[1]
        positions, documents, extra_mask = self._read_mask()
        groups, reads = of_all_heads(groups, reads, kv_heads)
        pattern = pattern if pattern.num_bands == reads.shape[-1] else replace(pattern, num_bands=reads.shape[-1])
        who = WhoAttends(pattern, positions, groups, reads, documents, extra_mask, self.first_position, memberships)
        return Problem(self.query, self.key, self.value, who, scores)

    def _read_mask(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The mask as positions, documents and pairs, see `WhoAttends`: documents where several are packed into a row,
        pairs where causality, padding and documents do not say it all.
        """
        (batch, _, num_queries, _), num_keys, mask = self.query.shape, self.key.shape[2], self.mask
        if mask is None:
            index = torch.arange(num_keys, device=self.query.device)
            return (index + self.dropped if self.dropped else index).expand(batch, num_keys), None, None
        if mask.dim() == 2:
            return self._positions(mask.bool()), None, None
        allowed = allowed_pairs(mask).expand(batch, -1, -1, -1)
        real = allowed[:, 0, -1]
        causal = causal_mask(num_queries, num_keys, mask.device)
        if bool((allowed == (causal & real[:, None, None, :])).all()):
            return self._positions(real), None, None
        if num_queries == num_keys and not self.is_sliding:
            # Packed documents: a token's position is the number of tokens it may look back at, itself excluded.
            positions = allowed[:, 0].sum(dim=-1) - 1
            documents = allowed[:, 0].int().argmax(dim=-1)  # the first token it may look back at
            real = positions != PADDING
            same = (documents[:, :, None] == documents[:, None, :]) & real[:, :, None] & real[:, None, :]
            ordered = bool((documents.cummax(dim=-1).values == documents)[real].all())
            if ordered and bool((allowed == (same & causal)[:, None]).all()):
                return positions, documents, None
            return positions, None, allowed
        return self._positions(allowed[:, 0].any(dim=1)), None, allowed

    def _positions(self, real: Tensor) -> Tensor:
        return torch.where(real, real.cumsum(dim=-1) - 1 + self.dropped, PADDING)


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
