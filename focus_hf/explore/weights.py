"""Attention weights of one head as they are, a few queries at a time: over what it reads, and over everything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..adapter import Seen
from ..attention import attended_pairs
from ..attention.definition import dense_pairs

#: Queries whose weights are spelled out at a time; bounds memory at a few heads times ``CHUNK x T``.
CHUNK = 256


@dataclass(frozen=True)
class Stretch:
    """What the queries ``start`` to ``stop`` of a head read among the tokens up to them.

    Args:
        start, stop: which queries.
        distance: int64 ``(Q, S)``, how far back each token is; negative for later ones.
        read: float32 ``(Q, S)``, attention weights, mean over the query heads.
        dense: float32 ``(Q, S)``, the same without the adapter's choice.
        pairs: bool ``(Q, S)``, attended.
        possible: bool ``(Q, S)``, attended by dense attention.
    """

    start: int
    stop: int
    distance: Tensor
    read: Tensor
    dense: Tensor
    pairs: Tensor
    possible: Tensor


def stretches(seen: Seen, head: int | None) -> Iterator[Stretch]:
    """A head's attention in a call for one sequence.

    Args:
        seen: the call.
        head: key/value head; ``None`` for all heads together, which then read the same.
    """
    heads, length = seen.query.shape[1], seen.query.shape[2]
    each = heads // seen.key.shape[1]
    chosen = range(heads) if head is None else range(head * each, (head + 1) * each)
    positions = torch.arange(length, device=seen.query.device)
    for start in range(0, length, CHUNK):
        stop = min(start + CHUNK, length)
        rows, columns = slice(start, stop), slice(0, stop)
        pairs, possible = attended_pairs(seen.who, rows, columns)[0], dense_pairs(seen.who, rows, columns)[0]
        pairs, possible = (x[(head or 0) * x.shape[0] // seen.key.shape[1]] for x in (pairs, possible))
        read, dense = (torch.zeros(pairs.shape, device=pairs.device) for _ in range(2))
        for query_head in chosen:
            scores = _scores(seen, query_head, query_head // each, rows, columns)
            read += _softmax(seen, query_head, scores, pairs)
            dense += _softmax(seen, query_head, scores, possible)
        distance = positions[rows, None] - positions[None, columns]
        yield Stretch(start, stop, distance, read / len(chosen), dense / len(chosen), pairs, possible)


def _scores(seen: Seen, query_head: int, key_head: int, rows: slice, columns: slice) -> Tensor:
    """float32 ``(Q, S)``."""
    how = seen.scores
    scores = (seen.query[0, query_head, rows].float() @ seen.key[0, key_head, columns].float().T) * how.scale
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    bias = how.part(rows, columns).bias
    return scores if bias is None else scores + bias[0, min(query_head, bias.shape[1] - 1)]


def _softmax(seen: Seen, query_head: int, scores: Tensor, pairs: Tensor) -> Tensor:
    scores, sinks = scores.masked_fill(~pairs, float("-inf")), seen.scores.sink_logits
    if sinks is not None:
        column = sinks[query_head].float().expand(len(scores), 1)
        scores = torch.cat([scores, column], dim=-1)
    return scores.softmax(dim=-1)[:, : pairs.shape[1]]
