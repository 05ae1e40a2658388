"""Packed calls: the new tokens of many requests in one row; which of them are whose, and where their keys stand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...attention import Pattern, Scores, focus_attention
from ..masks import Asked, added_to_scores
from ..routers import Routed


class Request(NamedTuple):
    """One request of a packed call: which new tokens are its, and which rows of the cache its keys are ``(S,)``."""

    new: slice
    rows: Tensor

    @property
    def is_single(self) -> bool:
        """It has one new token."""
        return self.new.stop - self.new.start == 1


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
    def requests(self) -> list[Request]:
        """Those with new tokens; made once for all layers."""
        edges = zip(pairwise(self.query_edges), pairwise(self.key_edges), strict=True)
        return [Request(slice(*new), self.rows[slice(*keys)]) for new, keys in edges if new[1] > new[0]]


def attend_requests(
    requests: Iterable[Request],
    query: Tensor,
    output: Tensor,
    stored: Callable[[Tensor], tuple[Tensor, Tensor]],
    route: Callable[[Request, Tensor, Tensor], Routed],
    pattern: Pattern,
    scores: Scores,
) -> None:
    """Hard attention of requests of a packed call, one after the other, whose keys are gathered.

    Args:
        requests: some of the call's.
        query: of the new tokens, ``(T, H, D)``.
        output: ``(T, H, D_v)``, written to.
        stored: from rows of the cache ``(S,)`` to keys ``(S, H_kv, D)`` and values ``(S, H_kv, D_v)``.
        route: from a request, its queries ``(1, H, Q, D)`` and keys ``(1, H_kv, S, D)`` to who attends.
        pattern: window, sinks, dense start.
        scores: how they are made.
    """
    for request in requests:
        key, value = (x.transpose(0, 1)[None].to(query.dtype) for x in stored(request.rows))
        own = query[request.new].transpose(0, 1)[None]
        problem = Asked(own, key, value, None, scores, key.shape[2]).problem(pattern, *route(request, own, key))
        output[request.new] = focus_attention(problem)[0].transpose(0, 1)


class PackedPages(Packed):
    """A packed call of transformers' continuous batching, from an allocator (`pages_of`) and a module's arguments."""

    def __init__(self, pages: Any, kwargs: dict[str, Any]) -> None:
        self.pages = pages
        self.written: Tensor = kwargs["write_index"][pages.index]
        read: Tensor = kwargs["read_index"][pages.index]
        rows = self.written if read.numel() == 0 else read  # no token of the call looks back at an earlier call's
        edges = kwargs["cu_seq_lens_k"][pages.layer_type].tolist()
        super().__init__(rows[: edges[-1]], kwargs["cu_seq_lens_q"].tolist(), edges)
        self._asked: tuple[Tensor, bool] | None = None

    @cached_property
    def positions(self) -> Tensor:
        """Of all keys: integers ``(keys,)``."""
        return torch.cat([torch.arange(len(request.rows)) for request in self.requests]).to(self.rows.device)

    @cached_property
    def singles(self) -> list[Request]:
        """The requests with one new token."""
        return [request for request in self.requests if request.is_single]

    @cached_property
    def of_singles(self) -> tuple[Tensor, Tensor, Tensor]:
        """Their new tokens and the positions of these, int64 ``(R,)``, and their blocks, int32 ``(R, most blocks)``, 0
        behind the last one."""
        new = torch.tensor([(request.new.start, len(request.rows) - 1) for request in self.singles])
        firsts = [request.rows[:: self.pages.tokens_per_page] for request in self.singles]
        table = pad_sequence(firsts, batch_first=True) // self.pages.block_physical_stride
        return *new.to(self.rows.device).unbind(1), table.int()

    def adds_to_scores(self, mask: Tensor | None) -> bool:
        """Whether the batch's mask does more than hide pairs.

        Asked once a step: all layers of these pages are handed the same mask, which is as large as the batch.
        """
        if mask is None:
            return False
        if self._asked is None or self._asked[0] is not mask:
            self._asked = mask, added_to_scores(mask) is not None
        return self._asked[1]
