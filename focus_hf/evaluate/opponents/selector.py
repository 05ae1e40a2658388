"""The one interface of all opponents: which pairs at a budget, and what choosing them costs.

For a layer's call a `Selector` gives a `Reader`, which says block by block of queries which keys they read. The budget
is a number of keys that every query reads at most, see `keys_at`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

#: Tokens that are always read: the first ones of a sequence, and the last ones up to the query's own.
SINKS, WINDOW = 4, 64

#: Queries are answered in blocks that end at multiples of this: it bounds memory.
BLOCK = 64


@dataclass(frozen=True)
class Call:
    """A layer's attention call, as a selector sees it.

    Args:
        query: of the last ``Q`` of ``S`` tokens, after rotary positions, float32 ``(B, H, Q, D)``.
        key: float32 ``(B, H_kv, S, D)``; query heads ``r * g`` to ``r * g + r - 1`` read key head ``g``.
        value: float32 ``(B, H_kv, S, D_v)``.
        scale: factor on ``q . k``.
        keys: that a query reads at most, itself and the tokens that are always read among them.
        layer: its number.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    keys: int
    layer: int = 0

    @property
    def length(self) -> int:
        """``S``."""
        return self.key.shape[2]

    @property
    def start(self) -> int:
        """Position of the first query."""
        return self.length - self.query.shape[2]

    def queries(self, first: int, end: int) -> Tensor:
        """Of the tokens at positions ``first`` to ``end - 1``: ``(B, H, R, D)``."""
        return self.query[:, :, first - self.start : end - self.start]


@dataclass(frozen=True)
class Estimate:
    """What stands in for keys that are not read: means, each for several of them.

    Args:
        key, value: ``(B, H_kv, C, D)``, ``(B, H_kv, C, D_v)``.
        log_sizes: of how many unread keys a mean stands for at a query, ``(B, H, R, C)``, is added to the scores.
    """

    key: Tensor
    value: Tensor
    log_sizes: Tensor


@dataclass(frozen=True)
class Choice:
    """What a block of queries reads: bool, causal, broadcast to ``(B, H, R, end)``; what stands in for the rest."""

    pairs: Tensor
    estimate: Estimate | None = None


#: From the positions ``first`` and ``end`` of a block of queries, see `blocks`, to what they read.
Reader = Callable[[int, int], Choice]


@dataclass(frozen=True)
class Cost:
    """What choosing costs beside what is read, as shares of what dense attention costs.

    A pair costs ``2 D`` products (its score, its value), and, as a new token reads its cache, ``2 D`` numbers.

    Args:
        products: of all queries of a prompt, in pairs' worth over the causal pairs.
        bytes: that the last token reads to choose, in pairs' worth over its keys.
    """

    products: float = 0.0
    bytes: float = 0.0


class Selector(ABC):
    """A method of sparse attention; ``name`` is that of its mode."""

    name: str
    #: The query heads of a key head choose once for all of them.
    together = False

    def choosing_together(self) -> Self:
        """The same method, the query heads of a key head choosing together (`agreed`): mode ``"...-gqa"``."""
        found = copy(self)
        found.together, found.name = True, f"{self.name}-gqa"
        return found

    def agreed(self, scores: Tensor, kv_heads: int) -> Tensor:
        """Scores ``(B, H, R, U)`` by which query heads choose: each its own, or, where those of a key head choose
        together, their softmaxes over units added up (Native Sparse Attention, Yuan et al., arXiv 2502.11089, equation
        10). Minus infinity are units that are not to be chosen among.
        """
        if not self.together:
            return scores
        shares = scores.softmax(dim=-1).nan_to_num().unflatten(1, (kv_heads, -1))
        return shares.sum(dim=2, keepdim=True).expand_as(shares).flatten(1, 2)

    @abstractmethod
    def reader(self, call: Call) -> Reader:
        """Look at a call."""

    def cost(self, length: int) -> Cost:
        """Of choosing in a context of so many tokens; nothing, where all is known beforehand."""
        return Cost()


def keys_at(share: float, length: int) -> int:
    """How many keys each query may read so that all of them read this share of the causal pairs: the nearest number.

    Queries that have fewer before them read all of them.

    Raises:
        ValueError: not a share.
    """
    if not 0 < share <= 1:
        raise ValueError(f"A share of pairs is above 0 and at most 1, such as 0.15; got {share!r}.")
    # Each query reading n keys leaves out the triangle of (length - n)(length - n + 1) / 2 pairs.
    guess = round(length - (length * (length + 1) * (1 - share)) ** 0.5)
    near = range(max(1, guess - 1), min(length, guess + 2) + 1)
    return min(near, key=lambda keys: abs(share_of(keys, length) - share))


def share_of(keys: int, length: int) -> float:
    """The share of the causal pairs of ``length`` tokens that are read, if each reads at most ``keys``."""
    left = max(0, length - keys)
    return 1 - left * (left + 1) / (length * (length + 1))


def less_scoring(share: float, selector: Selector, length: int) -> float:
    """What is left of a share of pairs to be read, when the products of choosing are counted as pairs.

    Raises:
        ValueError: nothing.
    """
    cost = selector.cost(length).products
    if cost >= share:
        raise ValueError(
            f"{selector.name} costs {100 * cost:.1f} % of the pairs to choose, and the budget is {100 * share:.1f} %. "
            "Give more, or do not count scoring."
        )
    return share - cost


def blocks(start: int, length: int) -> list[tuple[int, int]]:
    """The blocks of queries of a call: from one position to before another, ending at multiples of `BLOCK`."""
    edges = [start, *range(start // BLOCK * BLOCK + BLOCK, length, BLOCK), length]
    return list(zip(edges, edges[1:], strict=False))


def causal(first: int, end: int, device: torch.device) -> Tensor:
    """Keys up to each query's own: bool ``(R, end)``."""
    return torch.arange(first, end, device=device)[:, None] >= torch.arange(end, device=device)


def window(first: int, end: int, keys: Tensor | int, device: torch.device) -> Tensor:
    """The first tokens, and as many of the last as make up ``keys`` (broadcast) with them: bool ``(..., R, end)``."""
    i, j = torch.arange(first, end, device=device)[:, None], torch.arange(end, device=device)
    sinks = (torch.as_tensor(keys, device=device) - 1).clamp(max=SINKS)
    return (j <= i) & ((i - j < keys - sinks) | (j < sinks))


def read_best(scores: Tensor, first: int, keys: int) -> Tensor:
    """Let each query read the keys of the highest scores, beside those that are always read.

    Args:
        scores: of integers or floats without ties, ``(B, H, R, end)``; those of later keys do not matter.
        first: position of the first query.
        keys: that each may read, and reads if there are as many: bool of the scores' shape.
    """
    end = scores.shape[-1]
    allowed = causal(first, end, scores.device)
    if keys >= end:
        return allowed.expand(scores.shape)
    limits = torch.finfo(scores.dtype) if scores.is_floating_point() else torch.iinfo(scores.dtype)
    always = window(first, end, min(keys, SINKS + WINDOW), scores.device)
    scores = scores.masked_fill(always, limits.max).masked_fill(~allowed, limits.min)
    best = scores.topk(keys, dim=-1, sorted=False).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & allowed


def by_unit(unit_scores: Tensor, unit_of_key: Tensor) -> Tensor:
    """Scores of keys for `read_best`: units in the order of their scores, in a unit the last key first.

    So every query reads exactly as many keys as it may, of its last unit a part.

    Args:
        unit_scores: ``(B, H, R, U)``; of equal ones the later unit counts as better.
        unit_of_key: int64 ``(B, H_kv, end)``, or with 1 where all are alike.

    Returns:
        int32 ``(B, H, R, end)``, without ties.
    """
    (batch, heads, queries, _), end = unit_scores.shape, unit_of_key.shape[-1]
    order = unit_scores.argsort(dim=-1, stable=True)
    ranks = torch.empty_like(order, dtype=torch.int32)
    ranks.scatter_(-1, order, torch.arange(order.shape[-1], dtype=torch.int32, device=order.device).expand_as(order))
    of_heads = unit_of_key.repeat_interleave(heads // unit_of_key.shape[1], dim=1)[:, :, None]
    of_keys = ranks.gather(-1, of_heads.expand(batch, -1, queries, -1))
    return of_keys * end + torch.arange(end, dtype=torch.int32, device=order.device)


def products(query: Tensor, key: Tensor) -> Tensor:
    """``q . k`` of query heads with what their key heads have: of ``(B, H_kv, N, D)``, ``(B, H, R, N)``."""
    grouped = query.unflatten(1, (key.shape[1], -1))
    return torch.matmul(grouped, key[:, :, None].transpose(-1, -2)).flatten(1, 2)
