"""MoBA's choice (Lu et al., arXiv 2502.13189) on a model that was not trained with it: blocks by their mean key.

A block's score is the product of the query with the mean of its keys, the gate without parameters of MoBA's equation
6; the query's own block is always read. MoBA trains models with it; here nothing is trained. Blocks of 64 keys.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from .selector import Call, Choice, Cost, Reader, by_unit, products, read_best


class MeanBlocks:
    """Blocks of keys by their mean."""

    name = "blocks"
    size = 64

    def reader(self, call: Call) -> Reader:
        """See `Selector`."""
        filled = F.pad(call.key, (0, 0, 0, -call.length % self.size))
        means = filled.unflatten(2, (-1, self.size)).mean(dim=3)  # of the last, which may be partly filled: not used

        def read(first: int, end: int) -> Choice:
            query, seen = call.queries(first, end), -(-end // self.size)
            own = torch.arange(first, end, device=query.device) // self.size
            is_own = torch.arange(seen, device=query.device) == own[:, None]
            scores = products(query, means[:, :, :seen]).masked_fill(is_own, torch.inf)
            of_keys = torch.arange(end, device=query.device) // self.size
            return Choice(read_best(by_unit(scores, of_keys), first, call.keys))

        return read

    def cost(self, length: int) -> Cost:
        """One vector for each block: half of a pair's worth."""
        return Cost(0.5 / self.size, 0.5 / self.size)
