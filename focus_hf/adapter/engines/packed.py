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

#: One or several requests whose keys are gathered: which new tokens ``(R, Q)``; which rows of the cache their keys are
#: ``(R, S)``, aligned at the right; the positions of the keys ``(R, S)``, `PADDING` where a request has fewer.
Requests = tuple[Tensor, Tensor, Tensor]


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
    def _spans(self) -> list[tuple[int, int, int, int]]:
        """Of each request where its new tokens begin and end, and its keys."""
        return [(*new, *keys) for new, keys in zip(pairwise(self.query_edges), pairwise(self.key_edges), strict=True)]

    @cached_property
    def prompts(self) -> list[Requests]:
        """The requests with several new tokens, each by itself; made once for all layers."""
        device = self.rows.device
        return [
            (
                torch.arange(q, q_stop, device=device)[None],
                self.rows[None, k:k_stop],
                torch.arange(k_stop - k, device=device)[None],
            )
            for q, q_stop, k, k_stop in self._spans
            if q_stop - q > 1
        ]

    @cached_property
    def singles(self) -> Tensor:
        """The requests with one new token: integers ``(R, 3)``, that token, and where its keys begin and end."""
        found = [(q, k, k_stop) for q, q_stop, k, k_stop in self._spans if q_stop - q == 1]
        return torch.tensor(found, device=self.rows.device).view(-1, 3)

    @cached_property
    def gathered_singles(self) -> list[Requests]:
        """The requests with one new token, all together."""
        if not len(self.singles):
            return []
        query, start, stop = self.singles.T
        keys = stop[:, None] + torch.arange(-int((stop - start).max()), 0, device=stop.device)
        positions = torch.where(keys < start[:, None], PADDING, keys - start[:, None])
        return [(query[:, None], self.rows[keys.clamp(min=0)], positions)]


def attend_requests(
    requests: list[Requests],
    query: Tensor,
    output: Tensor,
    stored: Callable[[Tensor], tuple[Tensor, Tensor]],
    route: Callable[[Requests, Tensor, Tensor], Routed],
    pattern: Pattern,
    scores: Scores,
) -> None:
    """Hard attention of requests whose keys are gathered.

    Args:
        requests: of a packed call.
        query: of the new tokens, ``(T, H, D)``.
        output: ``(T, H, D_v)``, written to.
        stored: from rows of the cache ``(R, S)`` to keys ``(R, S, H_kv, D)`` and values ``(R, S, H_kv, D_v)``.
        route: from requests, their queries ``(R, H, Q, D)`` and keys ``(R, H_kv, S, D)`` to who attends.
        pattern: window, sinks, dense start.
        scores: how they are made.
    """
    for some in requests:
        new, rows, positions = some
        key, value = (x.transpose(1, 2).to(query.dtype) for x in stored(rows))
        own = query[new].transpose(1, 2)
        groups, reads, memberships = route(some, own, key)
        groups, reads = groups.expand(-1, key.shape[1], -1), reads.expand(-1, key.shape[1], -1, -1, -1)
        bands = replace(pattern, num_bands=reads.shape[-1])
        alone = 0 if rows.shape[0] == 1 else None
        who = WhoAttends(bands, positions, groups, reads, first_position=alone, memberships=memberships)
        output[new] = focus_attention(Problem(own, key, value, who, scores)).transpose(1, 2)


class PackedPages(Packed):
    """A packed call of transformers' continuous batching, from an allocator (`pages_of`) and a module's arguments."""

    def __init__(self, pages: Any, kwargs: dict[str, Any]) -> None:
        self.pages = pages
        self.written: Tensor = kwargs["write_index"][pages.index]
        read: Tensor = kwargs["read_index"][pages.index]
        rows = self.written if read.numel() == 0 else read  # no token of the call looks back at an earlier call's
        super().__init__(rows, kwargs["cu_seq_lens_q"].tolist(), kwargs["cu_seq_lens_k"][pages.layer_type].tolist())
        self._asked: tuple[Tensor, bool] | None = None

    @cached_property
    def positions(self) -> Tensor:
        """Of all keys: integers ``(keys,)``."""
        edges = torch.tensor(self.key_edges, device=self.rows.device)
        first = edges[:-1].repeat_interleave(edges.diff())
        return torch.arange(len(first), device=edges.device) - first

    @cached_property
    def table(self) -> Tensor:
        """The blocks of the requests with one new token: int32 ``(R, most blocks)``, 0 behind the last one."""
        _, start, stop = self.singles.T
        size = self.pages.tokens_per_page
        first = torch.arange(0, int((stop - start).max()), size, device=start.device) + start[:, None]
        block = self.rows[first.clamp(max=len(self.rows) - 1)] // self.pages.block_physical_stride
        return torch.where(first < stop[:, None], block, 0).int()

    def adds_to_scores(self, mask: Tensor | None) -> bool:
        """Whether the batch's mask does more than hide pairs.

        Asked once a step: all layers of these pages are handed the same mask, which is as large as the batch.
        """
        if mask is None:
            return False
        if self._asked is None or self._asked[0] is not mask:
            self._asked = mask, added_to_scores(mask) is not None
        return self._asked[1]
