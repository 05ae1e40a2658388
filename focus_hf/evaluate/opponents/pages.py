"""Pages of a size, of which a query reads its own and those of the highest scores: Quest, and MoBA's blocks."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from torch.nn import functional as F

from .selector import Call, Choice, Cost, Reader, Selector, by_unit, products, read_best


class Pages(Selector):
    """Pages of ``size`` keys, each known by as many ``vectors``."""

    size: int
    vectors: int

    @abstractmethod
    def known(self, pages: Tensor) -> tuple[Tensor, ...]:
        """Vectors ``(B, H_kv, P, D)`` of pages ``(B, H_kv, P, size, D)``."""

    @abstractmethod
    def scores(self, query: Tensor, known: tuple[Tensor, ...]) -> Tensor:
        """Of pages by what is known of them, for queries ``(B, H, R, D)``: ``(B, H, R, P)``."""

    def reader(self, call: Call) -> Reader:
        # What fills up the last page is never looked at: at a query in it, it is the query's own page.
        known = self.known(F.pad(call.key, (0, 0, 0, -call.length % self.size)).unflatten(2, (-1, self.size)))

        def read(first: int, end: int) -> Choice:
            seen, page_of_key = -(-end // self.size), torch.arange(end, device=call.key.device) // self.size
            page, own = torch.arange(seen, device=page_of_key.device), page_of_key[first:, None]
            scores = self.scores(call.queries(first, end), tuple(vectors[:, :, :seen] for vectors in known))
            scores = self.agreed((scores * call.scale).masked_fill(page >= own, -torch.inf), call.key.shape[1])
            scores = scores.masked_fill(page == own, torch.inf)
            return Choice(read_best(by_unit(scores, page_of_key[None, None]), first, call.keys))

        return read

    def cost(self, length: int) -> Cost:
        """A vector of a page is half of a pair's worth."""
        each = self.vectors / 2 / self.size
        return Cost(each, each)


class Quest(Pages):
    """Quest (Tang et al., arXiv 2406.10774): pages of keys by a bound on their scores.

    Of each page the least and the largest value of every channel are kept. A page's score is the most that a key
    between them could get: ``sum_d max(q_d min_d, q_d max_d)``. Quest keeps the first two layers dense and is for
    decoding; here every routed layer and every query of a prompt chooses, with the pages that were full at that query.
    """

    name = "quest"
    size, vectors = 16, 2

    def known(self, pages: Tensor) -> tuple[Tensor, ...]:
        return pages.amin(dim=3), pages.amax(dim=3)

    def scores(self, query: Tensor, known: tuple[Tensor, ...]) -> Tensor:
        least, most = known
        return products(query.clamp(min=0), most) + products(query.clamp(max=0), least)


class MeanBlocks(Pages):
    """MoBA's choice (Lu et al., arXiv 2502.13189) on a model that was not trained with it: blocks by their mean key.

    A block's score is the product of the query with the mean of its keys, the gate without parameters of MoBA's
    equation 6; the query's own block is always read. MoBA trains models with it; here nothing is trained.
    """

    name = "blocks"
    size, vectors = 64, 1

    def known(self, pages: Tensor) -> tuple[Tensor, ...]:
        return (pages.mean(dim=3),)

    def scores(self, query: Tensor, known: tuple[Tensor, ...]) -> Tensor:
        return products(query, *known)
