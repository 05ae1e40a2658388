"""Attention weights, spelled out a few queries at a time: kernels never build them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..adapter import Seen
from ..attention import Pattern, attended_pairs
from ..attention.definition import bands_of, dense_pairs

#: Queries whose weights are spelled out at a time; bounds memory at a few heads times ``CHUNK x T``.
CHUNK = 256


@dataclass(frozen=True)
class Stretch:
    """What a router does for the queries ``start`` to ``stop`` of a call for one sequence: pairs ``(Q, S)`` with all
    tokens up to them. *Far* is further back than the local window, and no sink.

    Args:
        seen: the call.
        name: of the layer, or of the head that routes by itself, as observers know it.
        head: key/value head; ``None`` for all heads of a layer, which then read the same.
        start, stop: which queries.
        distance: float32 ``(Q, S)``, how far back each token is; negative for later ones.
        bands: bool ``(bands, Q, S)``, whether a token is far, and in that band.
        no_sink: bool ``(S,)``.
        pairs: bool ``(Q, S)``, attended.
        possible: bool ``(Q, S)``, attended by dense attention.
    """

    seen: Seen
    name: str
    head: int | None
    start: int
    stop: int
    distance: Tensor
    bands: Tensor
    no_sink: Tensor
    pairs: Tensor
    possible: Tensor

    def weights(self, *some: Tensor) -> list[Tensor]:
        """Attention weights over each of some pairs, bool ``(Q, S)``: float32 ``(Q, S)``, mean over the router's query
        heads.

        With ``self.pairs`` the head's own, with ``self.possible`` those of dense attention with its queries and keys.
        """
        totals = [torch.zeros(pairs.shape, device=pairs.device) for pairs in some]
        count, sinks = self.seen.query.shape[1], self.seen.scores.sink_logits
        each = count // self.seen.key.shape[1]
        heads = range(count) if self.head is None else range(self.head * each, (self.head + 1) * each)
        for query_head in heads:
            of_all = self._scores(query_head)
            for total, pairs in zip(totals, some, strict=True):
                scores = of_all.masked_fill(~pairs, float("-inf"))
                if sinks is not None:  # takes part in the softmax, and is no token
                    scores = torch.cat([scores, sinks[query_head].float().expand(len(scores), 1)], dim=-1)
                total += scores.softmax(dim=-1)[:, : self.stop]
        return [total / len(heads) for total in totals]

    def _scores(self, query_head: int) -> Tensor:
        query, key, how = self.seen.query, self.seen.key, self.seen.scores
        rows, columns = slice(self.start, self.stop), slice(0, self.stop)
        key_head = query_head * key.shape[1] // query.shape[1]
        scores = (query[0, query_head, rows].float() @ key[0, key_head, columns].float().T) * how.scale
        if how.softcap is not None:
            scores = how.softcap * torch.tanh(scores / how.softcap)
        bias = how.part(rows, columns).bias
        return scores if bias is None else scores + bias[0, min(query_head, bias.shape[1] - 1)].float()


def stretches(seen: Seen, pattern: Pattern) -> Iterator[Stretch]:
    """All stretches of a call's first sequence, and of each one all routers, by distances in a pattern's bands."""
    who, name, length = seen.who.sequence(0), seen.layer.name, seen.query.shape[2]
    by_cells, kv_heads = seen.layer.routing_config.by_cells, seen.key.shape[1]
    routers = {f"{name}.{head}": head for head in range(kv_heads)} if by_cells else {name: None}
    positions = torch.arange(length, device=seen.query.device)
    for start in range(0, length, CHUNK):
        stop = min(start + CHUNK, length)
        rows, columns = slice(start, stop), slice(0, stop)
        distance = positions[rows, None] - positions[None, columns]
        no_sink = positions[columns] >= pattern.sink_tokens
        far, band = (distance > pattern.local_window) & no_sink, bands_of(distance, pattern)
        bands = torch.stack([far & (band == number) for number in range(pattern.num_bands)])
        both = attended_pairs(who, rows, columns)[0], dense_pairs(who, rows, columns)[0]
        for router, head in routers.items():
            pairs, possible = (of.expand(max(len(of), kv_heads), -1, -1).unflatten(0, (kv_heads, -1)) for of in both)
            pairs, possible = (of[head or 0].any(dim=0) for of in (pairs, possible))
            yield Stretch(
                seen, router, head, start, stop, distance.float(), bands, no_sink, pairs=pairs, possible=possible
            )
