"""Packed calls: the new tokens of many requests in one row; which of them are whose, and where their keys stand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...attention import PADDING, Pattern, Problem, Scores, WhoAttends, focus_attention
from ..masks import added_to_scores
from ..routers import Routed


@dataclass(eq=False)
class Packed:
    """Which tokens of a packed call are whose, and where their keys stand.

    Args:
        rows: integers ``(keys,)``, where the keys stand in the cache: request after request, each from its first token
            to the last new one.
        query_edges: where the new tokens of each request begin in the call, and where the last one's end.
        key_edges: likewise in ``rows``.
    """

    rows: Tensor
    query_edges: list[int]
    key_edges: list[int]

    @property
    def longest(self) -> int:
        """Keys of the longest request."""
        return max(stop - start for start, stop in pairwise(self.key_edges))

    @cached_property
    def requests(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The requests, those with one new token together, each other one by itself; made once for all layers.

        Of each: which new tokens ``(R, Q)``; which rows of the cache their keys are ``(R, S)``, aligned at the right;
        and the positions of the keys ``(R, S)``, `PADDING` where a request has fewer.
        """
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        single: list[tuple[int, int, int]] = []
        for (q, q_stop), (k, k_stop) in zip(pairwise(self.query_edges), pairwise(self.key_edges), strict=True):
            if q_stop - q == 1:
                single.append((q, k, k_stop))
            elif q_stop > q:
                new = torch.arange(q, q_stop, device=self.rows.device)[None]
                places = torch.arange(k_stop - k, device=self.rows.device)[None]
                found.append((new, self.rows[None, k:k_stop], places))
        if single:
            query, start, stop = torch.tensor(single, device=self.rows.device).T
            longest = max(k_stop - k for _, k, k_stop in single)
            keys = stop[:, None] - longest + torch.arange(longest, device=stop.device)
            positions = torch.where(keys < start[:, None], PADDING, keys - start[:, None])
            found.append((query[:, None], self.rows[keys.clamp(min=0)], positions))
        return found


def attend_requests(
    packed: Packed,
    query: Tensor,
    stored: Callable[[Tensor], tuple[Tensor, Tensor]],
    route: Callable[[tuple[Tensor, Tensor, Tensor], Tensor, Tensor], Routed],
    pattern: Pattern,
    scores: Scores,
) -> Tensor:
    """Hard attention of a packed call.

    Args:
        packed: whose tokens are which.
        query: of the new tokens, ``(1, H, T, D)``.
        stored: from rows of the cache ``(R, S)`` to keys ``(R, S, H_kv, D)`` and values ``(R, S, H_kv, D_v)``.
        route: from requests (one of ``packed.requests``), their queries ``(R, H, Q, D)`` and keys ``(R, H_kv, S, D)``
            to who attends.
        pattern: window, sinks, dense start.
        scores: how they are made.

    Returns:
        ``(1, H, T, D_v)``.
    """
    output: Tensor | None = None
    for requests in packed.requests:
        new, rows, positions = requests
        key, value = (x.transpose(1, 2).to(query.dtype) for x in stored(rows))
        own = query[0][:, new].transpose(0, 1)
        groups, reads, memberships = route(requests, own, key)
        groups, reads = groups.expand(-1, key.shape[1], -1), reads.expand(-1, key.shape[1], -1, -1, -1)
        bands = replace(pattern, num_bands=reads.shape[-1])
        alone = 0 if rows.shape[0] == 1 else None
        who = WhoAttends(bands, positions, groups, reads, first_position=alone, memberships=memberships)
        if output is None:
            output = query.new_zeros(query.shape[2], query.shape[1], value.shape[-1])
        output[new] = focus_attention(Problem(own, key, value, who, scores)).transpose(1, 2)
    return torch.zeros_like(query) if output is None else output.transpose(0, 1)[None]


class PackedPages(Packed):
    """A packed call of transformers' continuous batching, from an allocator (`pages_of`) and a module's arguments."""

    def __init__(self, pages: Any, kwargs: dict[str, Any]) -> None:
        self.pages = pages
        self.written: Tensor = kwargs["write_index"][pages.index]
        read: Tensor = kwargs["read_index"][pages.index]
        rows = self.written if read.numel() == 0 else read  # no token of the call looks back at an earlier call's
        super().__init__(rows, kwargs["cu_seq_lens_q"].tolist(), kwargs["cu_seq_lens_k"][pages.layer_type].tolist())
        self._asked: tuple[Tensor, bool] | None = None

    def adds_to_scores(self, mask: Tensor | None) -> bool:
        """Whether the batch's mask does more than hide pairs.

        Asked once a step: all layers of these pages are handed the same mask, which is as large as the batch.
        """
        if mask is None:
            return False
        if self._asked is None or self._asked[0] is not mask:
            self._asked = mask, added_to_scores(mask) is not None
        return self._asked[1]
