"""MInference's vertical and slash lines (Jiang et al., arXiv 2407.02490): keys that all read, distances that all read.

The last 64 queries of a prompt attend densely; what falls on each key is the worth of its vertical line, what falls
at each distance that of its slash line, and every query of the prompt reads the best lines of both kinds. *So what
an earlier query reads depends on later tokens*: it is a method for prompts that are all there. How many lines of
each kind, MInference searches for each head beforehand, on a sample; here it is searched in the prompt itself, among
five divisions of the budget and a window (its A-shape), by how much attention of 64 queries from all over the prompt
is kept. Tokens that come later, with a cache, attend to everything, as there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .selector import SINKS, WINDOW, Call, Choice, Cost, Reader, Selector, causal, products


class Slash(Selector):
    """Vertical and slash lines, by the last queries."""

    name = "slash"
    last = 64
    divisions = (0.0, 0.25, 0.5, 0.75, 1.0)

    def reader(self, call: Call) -> Reader:
        lines = None if call.start else self.lines(call)

        def read(first: int, end: int) -> Choice:
            allowed = causal(first, end, call.key.device)
            queries = torch.arange(first, end, device=allowed.device)
            return Choice(allowed if lines is None else on_lines(*lines, queries, end) & allowed)

        return read

    def lines(self, call: Call) -> tuple[Tensor, Tensor]:
        """Of each head, which keys and which distances are read: bool ``(B, H, S)`` twice."""
        length, count = call.length, min(self.last, call.length)
        rows = causal(length - count, length, call.key.device)
        scores = products(call.queries(length - count, length), call.key) * call.scale
        weights = scores.masked_fill(~rows, -torch.inf).softmax(dim=-1)
        places = torch.arange(length, device=rows.device)
        distance = (places[-count:, None] - places).clamp(min=0).flatten().expand(*weights.shape[:2], -1)
        by_distance = torch.zeros_like(weights[:, :, 0]).scatter_add_(-1, distance, weights.flatten(2))
        by_key = weights.sum(dim=2)
        found = [self._divided(by_key, by_distance, call.keys, division) for division in self.divisions]
        found.append(self._divided(by_key, -places.expand_as(by_key).float(), call.keys, 0.0))  # A-shape: the nearest
        # What each keeps of the attention of queries from all over the prompt.
        queries = places[:: -(-length // self.last)]
        scores = products(call.query[:, :, queries], call.key) * call.scale
        weights = scores.masked_fill(queries[:, None] < places, -torch.inf).softmax(dim=-1)
        kept = [(on_lines(*lines, queries, length) * weights).sum(dim=(-1, -2)) for lines in found]
        best = torch.stack(kept).argmax(dim=0)[None, ..., None].expand(1, -1, -1, length)
        keys, distances = (torch.stack(kind).gather(0, best)[0] for kind in zip(*found, strict=True))
        return keys, distances

    def cost(self, length: int) -> Cost:
        """The scores of the last queries, once; new tokens choose nothing."""
        return Cost(products=min(self.last, length) / (length + 1))

    def _divided(self, by_key: Tensor, by_distance: Tensor, keys: int, division: float) -> tuple[Tensor, Tensor]:
        """The best lines whose pairs, with those that are always read, come to the budget.

        Args:
            by_key, by_distance: the worth of lines, ``(B, H, S)``.
            keys: that each query reads, on average over a prompt.
            division: what vertical lines may take of what is left for lines.
        """
        length, device = by_key.shape[-1], by_key.device
        places, sinks = torch.arange(length, device=device), min(keys - 1, SINKS)
        near = min(WINDOW, keys - sinks)
        sizes = length - places  # pairs on the line of a key, and of a distance
        total = int(sizes[: min(keys, length)].sum())  # as many as a window of so many keys has
        vertical, slash = (places < sinks).expand(by_key.shape), (places < near).expand(by_key.shape)
        used = int(sizes[:near].sum()) + int((sizes - near).clamp(min=0)[:sinks].sum())
        added = (sizes - near).clamp(min=0).expand(by_key.shape)
        room = torch.full_like(by_key[..., :1], division * (total - used))
        vertical = vertical | _prefix(by_key, added, ~vertical, room)
        # A slash line has a pair for each key before its end, less those on vertical lines.
        taken = vertical.cumsum(dim=-1).flip(-1)
        added = sizes - taken
        used_now = (added * slash).sum(dim=-1, keepdim=True) + (sizes * vertical).sum(dim=-1, keepdim=True)
        return vertical, slash | _prefix(by_distance, added, ~slash, total - used_now)


def on_lines(keys: Tensor, distances: Tensor, queries: Tensor, end: int) -> Tensor:
    """Pairs of queries at positions ``(R,)`` that are on lines, later keys among them: bool ``(B, H, R, end)``."""
    apart = queries[:, None] - torch.arange(end, device=keys.device)
    return keys[:, :, None, :end] | distances[:, :, apart.clamp(min=0)]


def _prefix(worth: Tensor, pairs: Tensor, free: Tensor, room: Tensor) -> Tensor:
    """Of the lines that are free, the most worthy whose pairs fit: bool ``(B, H, S)``."""
    order = worth.masked_fill(~free, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    counted = pairs.gather(-1, order) * free.gather(-1, order)
    fits = (counted.cumsum(dim=-1) <= room) & free.gather(-1, order)
    return torch.zeros_like(free).scatter(-1, order, fits)
