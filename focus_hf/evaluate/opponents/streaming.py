"""Streaming heads: DuoAttention (Xiao et al., arXiv 2410.10819). Some key/value heads attend to everything, the
others to the last tokens and the first.

DuoAttention finds which by training a gate for each head on retrieval of synthetic passkeys. Here it is measured, on
the first window of the very text that is judged (`Measure`): how far a window of 64 and 4 first tokens moves a
head's own output, summed over its squares. Heads of the whole model are ordered by that; those that are moved most
are dense. The windows of the others take half of the budget, or 64 tokens where that is more; one head more gets a
window of what is left.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .selector import SINKS, WINDOW, Call, Choice, Reader, Selector, causal, keys_at, products, share_of, window


class Streaming(Selector):
    """Dense and streaming heads.

    Args:
        losses: of each layer by its number, what its key/value heads lose to a window, ``(H_kv,)``; without them it
            cannot attend.
    """

    name = "streaming"

    def __init__(self, losses: Mapping[int, Tensor] | None = None) -> None:
        measured = (losses or {}).items()
        each = [(float(loss), layer, head) for layer, heads in measured for head, loss in enumerate(heads)]
        self.order = [(layer, head) for _, layer, head in sorted(each, key=lambda entry: -entry[0])]

    def reader(self, call: Call) -> Reader:
        if not any(layer == call.layer for layer, _ in self.order):
            raise ValueError(f"What heads of layer {call.layer} lose to a window was not measured: make_selector().")
        keys = self.keys_of_heads(call.keys, call.length)
        own = torch.tensor([keys[call.layer, head] for head in range(call.key.shape[1])], device=call.key.device)
        each = own.repeat_interleave(call.query.shape[1] // call.key.shape[1])[:, None, None]
        return lambda first, end: Choice(window(first, end, each, call.key.device))

    def keys_of_heads(self, keys: int, length: int) -> dict[tuple[int, int], int]:
        """Of each layer and key/value head, how many keys its queries read, so that the mean share is the budget's."""
        budget = share_of(keys, length)
        least = min(keys, max(SINKS + WINDOW, keys_at(budget / 2, length)))
        streaming = share_of(least, length)
        dense = (budget - streaming) / max(1 - streaming, 1e-9) * len(self.order)
        whole = int(dense + 1e-6)
        chosen = dict.fromkeys(self.order[:whole], length)
        chosen |= dict.fromkeys(self.order[whole:], least)
        if whole < len(self.order) and (rest := dense - whole) > 1e-6:
            chosen[self.order[whole]] = max(least, keys_at(streaming + rest * (1 - streaming), length))
        return chosen


class Measure(Selector):
    """Attends to everything and notes how far a window would move heads' outputs, as `Streaming` takes it."""

    name = "measure"

    def __init__(self) -> None:
        self.losses: dict[int, Tensor] = {}

    def reader(self, call: Call) -> Reader:
        def read(first: int, end: int) -> Choice:
            key, value = call.key[:, :, :end], call.value[:, :, :end]
            scores = products(call.queries(first, end), key) * call.scale
            allowed = causal(first, end, key.device)
            near = window(first, end, SINKS + WINDOW, key.device)
            whole, part = (
                products(scores.masked_fill(~pairs, -torch.inf).softmax(dim=-1), value.transpose(-1, -2))
                for pairs in (allowed, near)
            )
            lost = (whole - part).square().sum(dim=(0, 2, 3)).unflatten(0, (key.shape[1], -1)).sum(dim=1)
            self.losses[call.layer] = self.losses.get(call.layer, 0) + lost.cpu()
            return Choice(allowed)

        return read
