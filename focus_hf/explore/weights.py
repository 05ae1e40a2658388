"""Attention weights as they are, a few queries at a time: over what a head reads, and over everything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..adapter import Seen
from ..attention import Pattern, attended_pairs
from ..attention.definition import bands_of, dense_pairs
from ..interpret.weights import scores_of, softmax_over

#: Queries whose weights are spelled out at a time; bounds memory at a few heads times ``CHUNK x T``.
CHUNK = 256


@dataclass(frozen=True)
class Stretch:
    """The queries ``start`` to ``stop`` of a call for one sequence, and the tokens up to them.

    Args:
        start, stop: which queries.
        distance: float32 ``(Q, S)``, how far back each token is; negative for later ones.
        bands: float32 ``(bands, Q, S)``, 1 where a token is far, in that band and no sink, else 0.
        no_sink: bool ``(S,)``.
        pairs: bool ``(H_kv or 1 or H, Q, S)``, attended.
        possible: bool ``(1 or H, Q, S)``, attended by dense attention.
    """

    start: int
    stop: int
    distance: Tensor
    bands: Tensor
    no_sink: Tensor
    pairs: Tensor
    possible: Tensor


@dataclass(frozen=True)
class Weights:
    """What a head reads in a stretch: attention weights, float32 ``(Q, S)``, means over its query heads, with the
    adapter's choice and without it, and the pairs of both, bool ``(Q, S)``."""

    read: Tensor
    dense: Tensor
    pairs: Tensor
    possible: Tensor


def stretches(seen: Seen, pattern: Pattern) -> Iterator[Stretch]:
    """The stretches of a call.

    Args:
        seen: the call.
        pattern: with the bands by which distances are told.
    """
    length, device = seen.query.shape[2], seen.query.device
    positions = torch.arange(length, device=device)
    for start in range(0, length, CHUNK):
        stop = min(start + CHUNK, length)
        rows, columns = slice(start, stop), slice(0, stop)
        distance = positions[rows, None] - positions[None, columns]
        no_sink = positions[columns] >= pattern.sink_tokens
        far, band = (distance > pattern.local_window) & no_sink, bands_of(distance, pattern)
        bands = torch.stack([far & (band == number) for number in range(pattern.num_bands)]).float()
        pairs, possible = attended_pairs(seen.who, rows, columns)[0], dense_pairs(seen.who, rows, columns)[0]
        yield Stretch(start, stop, distance.float(), bands, no_sink, pairs, possible)


def weights_of(seen: Seen, stretch: Stretch, head: int | None) -> Weights:
    """A head's attention.

    Args:
        seen: the call.
        stretch: of it.
        head: key/value head; ``None`` for all heads together, which then read the same.
    """
    heads, kv_heads = seen.query.shape[1], seen.key.shape[1]
    each = heads // kv_heads
    chosen = range(heads) if head is None else range(head * each, (head + 1) * each)
    pairs, possible = (of[(head or 0) * of.shape[0] // kv_heads] for of in (stretch.pairs, stretch.possible))
    read, dense = (torch.zeros(pairs.shape, device=pairs.device) for _ in range(2))
    for query_head in chosen:
        scores = scores_of(seen, query_head, slice(stretch.start, stretch.stop), slice(0, stretch.stop))
        read += softmax_over(seen, query_head, scores, pairs)
        dense += softmax_over(seen, query_head, scores, possible)
    return Weights(read / len(chosen), dense / len(chosen), pairs, possible)
