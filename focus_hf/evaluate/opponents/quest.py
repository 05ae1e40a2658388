"""Quest (Tang et al., arXiv 2406.10774): pages of keys by a bound on their scores.

Of each page of 16 keys the least and the largest value of every channel are kept. A page's score is the most that a
key between them could get: ``sum_d max(q_d min_d, q_d max_d)``. Quest keeps the first two layers dense and is for
decoding; here every routed layer and every query of a prompt chooses, with the pages that were full at that query.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from .selector import Call, Choice, Cost, Reader, by_unit, products, read_best


class Quest:
    """Pages by the bound of their channels."""

    name = "quest"
    page = 16

    def reader(self, call: Call) -> Reader:
        """See `Selector`."""
        more = -call.length % self.page
        # What fills up the last page is never looked at: at a query in it, it is the query's own page.
        pages = F.pad(call.key, (0, 0, 0, more)).unflatten(2, (-1, self.page))
        least, most = pages.amin(dim=3), pages.amax(dim=3)

        def read(first: int, end: int) -> Choice:
            query, seen = call.queries(first, end), -(-end // self.page)
            bound = products(query.clamp(min=0), most[:, :, :seen]) + products(query.clamp(max=0), least[:, :, :seen])
            own = torch.arange(first, end, device=query.device) // self.page
            is_own = torch.arange(seen, device=query.device) == own[:, None]
            of_keys = torch.arange(end, device=query.device) // self.page
            scores = by_unit(bound.masked_fill(is_own, torch.inf), of_keys)
            return Choice(read_best(scores, first, call.keys))

        return read

    def cost(self, length: int) -> Cost:
        """Two vectors for each page: a pair's worth."""
        return Cost(1 / self.page, 1 / self.page)
