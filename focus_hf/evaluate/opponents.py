"""What costs the same as Focus: a wider window, random groups, groups by token.

Nothing beats a plain window by itself (Xiong et al., arXiv 2112.07210), so every row of Focus stands beside these.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..adapter import FocusConfig, routing_by
from ..attention import Pattern, count_pairs

#: Multipliers of a hash (splitmix64), as signed 64-bit integers.
_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)


def equal_window(config: FocusConfig, length: int, pairs: float) -> int:
    """The narrowest window that, with the adapter's sinks, attends to at least as many pairs: found by bisection.

    Args:
        config: of the adapter.
        length: tokens of each sequence.
        pairs: share of the possible pairs.
    """
    nobody = torch.zeros(1, length, 0, dtype=torch.bool)

    def share(width: int) -> float:
        attended, possible = count_pairs(Pattern(width, config.sink_tokens, config.dense_below), nobody)
        return attended / possible

    low, high = 0, length - 1
    while low < high:
        middle = (low + high) // 2
        if share(middle) < pairs:
            low = middle + 1
        else:
            high = middle
    return low


def _hashed(*numbers: Tensor) -> Tensor:
    """Float64 in [0, 1) that looks random and depends on the integers alone; they are broadcast."""
    state = torch.zeros((), dtype=torch.long)
    for number in numbers:
        state = state + (number.long() + 1) * _MIX[0]
        state = (state ^ (state >> 30)) * _MIX[1]
        state = (state ^ (state >> 27)) * _MIX[2]
    return ((state >> 20) & 0xFFFFFFFF).double() / 2**32


@contextmanager
def random_groups(model: nn.Module, num_groups: int) -> Iterator[None]:
    """Within the block, groups are drawn by a token's place in its sequence: as many tokens in each, about nothing."""

    def scores(layer: int, heads: int, start: int, count: int) -> Tensor:
        places = torch.arange(start, start + count)[:, None, None]
        numbers = torch.tensor(layer), places, torch.arange(heads)[:, None], torch.arange(num_groups)
        return _hashed(*numbers).float()[None]

    with routing_by(model, scores):
        yield


@contextmanager
def token_groups(model: Any, num_groups: int, text: Tensor | None) -> Iterator[None]:
    """Within the block, the same token is always in the same groups, whatever its context.

    Args:
        model: with an active Focus adapter; its calls are given token ids.
        num_groups: ``K``.
        text: token ids by whose frequencies the groups are balanced.
    """
    embeddings = model.get_input_embeddings()
    table = balanced_tokens(embeddings.weight.shape[0], num_groups, text)
    ids = torch.zeros(1, 0, dtype=torch.long)

    def remember(module: nn.Module, args: tuple[Any, ...]) -> None:
        nonlocal ids
        ids = args[0].cpu()

    def scores(layer: int, heads: int, start: int, count: int) -> Tensor:
        return table[ids][:, :, None].expand(-1, -1, heads, -1)

    handle = embeddings.register_forward_pre_hook(remember)
    try:
        with routing_by(model, scores):
            yield
    finally:
        handle.remove()


def balanced_tokens(vocabulary: int, num_groups: int, text: Tensor | None) -> Tensor:
    """Scores of every token for every group: float32 ``(V, K)``.

    The first group of a token of the text is the one that had the fewest of its tokens, the most frequent ones being
    placed first; all else is drawn.
    """
    table = _hashed(torch.arange(vocabulary)[:, None], torch.arange(num_groups)).float()
    if text is None:
        return table
    tokens, counts = text.flatten().cpu().unique(return_counts=True)
    loads = [(0, group) for group in range(num_groups)]
    for place in counts.argsort(descending=True, stable=True).tolist():
        load, group = heapq.heappop(loads)
        table[tokens[place], group] += 1
        heapq.heappush(loads, (load + int(counts[place]), group))
    return table
