"""Clusters of a context's keys: Squeezed Attention (Hooper et al., arXiv 2411.09688), ClusterKV (Liu et al., arXiv
2412.03213), RetroInfer (Chen et al., arXiv 2505.02922).

Keys after rotary positions are clustered by k-means with cosine similarity, about 16 keys to a cluster, and a query
reads the clusters whose mean key has the largest product with it. RetroInfer also estimates what is not read: each
cluster by its mean key and the mean of its values, counted as often as it has unread keys.

The papers cluster a context that is finished. For all queries of a prompt to choose without a look at later tokens,
each block of 64 queries has clusters of its own, of all keys before the block: newer ones are among those that are
always read. That is more work than anybody would do, and better clusters than the papers'; it is not counted.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .selector import BLOCK, Call, Choice, Cost, Estimate, Reader, Selector, by_unit, products, read_best, window


class Clusters(Selector):
    """Clusters of keys by their mean.

    Args:
        estimate: stand in for what is not read.
    """

    size = 16
    rounds = 5

    def __init__(self, estimate: bool = False) -> None:
        self.estimate, self.name = estimate, "clusters-estimate" if estimate else "clusters"

    def reader(self, call: Call) -> Reader:
        def read(first: int, end: int) -> Choice:
            known = first // BLOCK * BLOCK
            query, key = call.queries(first, end), call.key[:, :, :known]
            if not known:
                return Choice(window(first, end, call.keys, query.device))
            cluster = k_means(key, -(-known // self.size), self.rounds)
            members = F.one_hot(cluster, -(-known // self.size)).to(key.dtype)  # (B, H_kv, known, C)
            sizes = members.sum(dim=2)
            means = members.transpose(-1, -2) @ key / sizes.clamp(min=1)[..., None]
            scores = self.agreed(products(query, means) * call.scale, key.shape[1])
            # Keys that are in no cluster yet come first.
            of_keys = F.pad(cluster, (0, end - known), value=means.shape[2])
            pairs = read_best(by_unit(F.pad(scores, (0, 1), value=torch.inf), of_keys), first, call.keys)
            if not self.estimate:
                return Choice(pairs)
            read_of = products(pairs[..., :known].to(key.dtype), members.transpose(-1, -2))
            values = members.transpose(-1, -2) @ call.value[:, :, :known] / sizes.clamp(min=1)[..., None]
            unread = sizes.repeat_interleave(query.shape[1] // key.shape[1], dim=1)[:, :, None] - read_of
            return Choice(pairs, Estimate(means, values, unread.clamp(min=0).log()))

        return read

    def cost(self, length: int) -> Cost:
        """A mean key for each cluster; to estimate, a mean value too. Clustering itself is not counted."""
        each = (1.0 if self.estimate else 0.5) / self.size
        return Cost(each, each)


def k_means(keys: Tensor, count: int, rounds: int) -> Tensor:
    """Clusters by cosine similarity, from evenly spaced keys: nothing is drawn.

    Args:
        keys: float32 ``(B, H, n, D)``.
        count: of clusters, at most ``n``; one that loses all keys stays where it is.
        rounds: of assigning and averaging.

    Returns:
        The cluster of each key, int64 ``(B, H, n)``.
    """
    directions = F.normalize(keys, dim=-1)
    starts = torch.arange(count, device=keys.device) * keys.shape[2] // count
    centres = directions[:, :, starts]
    for _ in range(rounds):
        cluster = (directions @ centres.transpose(-1, -2)).argmax(dim=-1)
        sums = torch.zeros_like(centres)
        sums.scatter_add_(2, cluster[..., None].expand_as(directions), directions)
        centres = torch.where(sums.abs().sum(dim=-1, keepdim=True) > 0, F.normalize(sums, dim=-1), centres)
    return (directions @ centres.transpose(-1, -2)).argmax(dim=-1)
