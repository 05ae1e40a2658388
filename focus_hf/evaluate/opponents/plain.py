"""What needs no look at keys or queries, and what needs all of them: a window, random groups, the oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from .selector import Call, Choice, Cost, Reader, Selector, by_unit, causal, products, read_best, window

#: Multipliers of a hash (splitmix64), as signed 64-bit integers.
_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)


class Window(Selector):
    """The last tokens and the first: StreamingLLM (Xiao et al., arXiv 2309.17453). Nothing beats it by itself for its
    pairs (Xiong et al., arXiv 2112.07210), so every row of Focus stands beside it.
    """

    name = "window"

    def reader(self, call: Call) -> Reader:
        return lambda first, end: Choice(window(first, end, call.keys, call.key.device))


class Random(Selector):
    """Groups that mean nothing: keys are in one by lot, and each query reads groups in an order of its own."""

    name = "random"
    groups = 64

    def reader(self, call: Call) -> Reader:
        heads, device = call.query.shape[1], call.key.device
        layer, kv_head = torch.tensor(call.layer), torch.arange(call.key.shape[1])[:, None]
        drawn = hashed(layer, kv_head, torch.arange(call.length)) * self.groups
        of_keys = drawn.long().to(device)[None]

        def read(first: int, end: int) -> Choice:
            places = torch.arange(first, end)[:, None]
            scores = hashed(layer, torch.arange(heads)[:, None, None], places, torch.arange(self.groups))
            return Choice(read_best(by_unit(scores.to(device)[None], of_keys[..., :end]), first, call.keys))

        return read


class Oracle(Selector):
    """The keys with most of dense attention's weight, as many for every head and query: no method, all are scored."""

    name = "oracle"

    def reader(self, call: Call) -> Reader:
        def read(first: int, end: int) -> Choice:
            scores = products(call.queries(first, end), call.key[:, :, :end]) * call.scale
            scores = scores.masked_fill(~causal(first, end, scores.device), -torch.inf)
            return Choice(read_best(self.agreed(scores, call.key.shape[1]), first, call.keys))

        return read

    def cost(self, length: int) -> Cost:
        """The score of every pair: half of what it costs."""
        return Cost(0.5, 0.5)


def hashed(*numbers: Tensor) -> Tensor:
    """Float64 in [0, 1) that looks random and depends on the integers alone; they are broadcast."""
    state = torch.zeros((), dtype=torch.long)
    for number in numbers:
        state = state + (number.long() + 1) * _MIX[0]
        state = (state ^ (state >> 30)) * _MIX[1]
        state = (state ^ (state >> 27)) * _MIX[2]
    return ((state >> 20) & 0xFFFFFFFF).double() / 2**32
