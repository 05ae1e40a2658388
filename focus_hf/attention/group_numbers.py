"""Memberships of tokens that are all in a known number of groups, as the numbers of these groups.

A token of one group of 64 is one number instead of 64 booleans, and whether a query reads its group is a look-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .constants import column, ends_as_scores
from .head_class import EVERYTHING
from .mask import Pattern


def numbers_of(memberships: Tensor, num_groups: int, each: int) -> Tensor:
    """Memberships as numbers.

    Args:
        memberships: bool ``(B, T, P * K)``, of one or several routings of ``K`` groups each.
        num_groups: ``K``.
        each: groups of every token in each routing, ``k``.

    Returns:
        int64 ``(B, P * k, T)``.
    """
    by_routing = memberships.unflatten(-1, (-1, num_groups)).to(torch.uint8)
    return by_routing.topk(each, dim=-1).indices.flatten(2).transpose(1, 2).contiguous()


def memberships_of(numbers: Tensor, num_groups: int, each: int) -> Tensor:
    """What `numbers_of` was made of."""
    by_routing = numbers.transpose(1, 2).unflatten(2, (-1, each))
    none = by_routing.new_zeros(*by_routing.shape[:3], num_groups, dtype=torch.bool)
    return none.scatter_(-1, by_routing, True).flatten(2)


@dataclass(frozen=True)
class OneToken:
    """The groups of a call with one new token for each sequence.

    Args:
        numbers: int64 ``(B, P * k, S)``, groups of all tokens (`numbers_of`).
        reads: float32 ``(B, P, K)``: 0 for groups that the new token reads, ``-inf`` for all others.
        patterns: of each key/value head, or one for all.
        heads: ascending, whose the ``P`` routings are; ``None`` for one routing of all heads.
    """

    numbers: Tensor
    reads: Tensor
    patterns: Sequence[Pattern]
    heads: tuple[int, ...] | None = None

    def added_to_scores(self) -> Tensor:
        """0 for tokens that the new one attends to, ``-inf`` for all others: float32 ``(B, H_kv or 1, S)``."""
        length, sinks = self.numbers.shape[-1], self.patterns[0].sink_tokens
        reach = tuple(
            EVERYTHING if length <= pattern.dense_below else pattern.local_window + 1 for pattern in self.patterns
        )
        shared = self._of_groups()
        if self.heads is None or len(self.heads) == len(self.patterns):
            added = torch.maximum(shared, ends_as_scores(reach, length, shared))
        else:
            own = ends_as_scores(tuple(reach[head] for head in self.heads), length, shared)
            added = ends_as_scores(reach, length, shared).expand(shared.shape[0], -1, -1).clone()
            added.index_copy_(1, column(self.heads, shared)[:, 0], torch.maximum(shared, own))
        if sinks:
            added[..., :sinks] = 0.0
        return added

    def _of_groups(self) -> Tensor:
        """``(B, P, S)``: 0 where a group is read."""
        batch, routings, num_groups = self.reads.shape
        each = self.numbers.shape[1] // routings
        if each == 1:
            return self.reads.gather(-1, self.numbers)
        reads = self.reads[:, :, None].expand(-1, -1, each, -1).reshape(batch, -1, num_groups)
        return reads.gather(-1, self.numbers).unflatten(1, (routings, each)).amax(dim=2)


def attend_one_token(query: Tensor, key: Tensor, value: Tensor, token: OneToken, scale: float) -> Tensor:
    """Hard Focus attention of one new token for each sequence, with plain scores and nothing hidden.

    The query heads of a key/value head become its queries, so that keys are read once and not repeated.

    Args:
        query: ``(B, H, 1, D)``.
        key: ``(B, H_kv, S, D)``.
        value: ``(B, H_kv, S, D_v)``.
        token: its groups and theirs.
        scale: factor on ``q . k``.

    Returns:
        ``(B, H, 1, D_v)``.
    """
    added = token.added_to_scores()[:, :, None].to(query.dtype)
    folded = query.unflatten(1, (key.shape[1], -1)).squeeze(3)
    output = F.scaled_dot_product_attention(folded, key, value, attn_mask=added, scale=scale)
    return output.flatten(1, 2)[:, :, None]
