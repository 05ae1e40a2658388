"""Who may attend to whom: the one definition of Focus attention. Every fast path is tested against it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

#: Position of a token that is padding: it attends to nothing and nothing attends to it.
PADDING = -1

#: All tokens.
EVERY = slice(None)


@dataclass(frozen=True)
class Pattern:
    """The numbers that shape the attention pattern besides groups.

    Args:
        local_window: ``w``; a pair at distance ``0 <= i - j <= w`` is always attended.
        sink_tokens: the first tokens of a sequence that every later token attends to (0 is the paper's method).
        dense_below: queries at positions below it attend to everything before them (0 is the paper's method).
        num_bands: bands of distance beyond the window, which double: ``(w, 2w], (2w, 4w], ...``, the last one open.
    """

    local_window: int = 128
    sink_tokens: int = 4
    dense_below: int = 0
    num_bands: int = 1

    @property
    def dense_length(self) -> int:
        """Sequences of at most this many tokens have all their pairs attended: they are dense attention."""
        return max(self.local_window + 1, self.dense_below)

    def band_starts(self) -> list[int]:
        """A pair is in band ``b`` if its distance is above this, and above no later one."""
        return [max(self.local_window, 1) << band for band in range(self.num_bands)]


@dataclass(frozen=True)
class WhoAttends:
    """What decides who attends to whom among ``S`` tokens, of which the last ``Q`` are queries.

    A key has a group; a query has a table of what it reads. Tensors of one head stand for all (``expand``, stride 0).

    Args:
        pattern: window, sinks, dense start, bands.
        positions: ``(B, S)`` integers, a token's rank in its document, ``PADDING`` for padding anywhere.
        key_groups: ``(B, H_kv, S)`` integers from 0 to ``K - 1`` (uint8 where they fit).
        reads: bool ``(B, H_kv, Q, K, bands)``: a query attends to the keys of a group at a distance.
        documents: ``(B, S)`` integers that never fall along a sequence, which of several documents packed into it;
            ``None`` for one each.
        extra_mask: bool ``(B, 1 or H, Q, S)``, pairs that the model itself allows, for anything beyond causality,
            padding and documents (a sliding window).
    """

    pattern: Pattern
    positions: Tensor
    key_groups: Tensor
    reads: Tensor
    documents: Tensor | None = None
    extra_mask: Tensor | None = None


def attended_pairs(who: WhoAttends, rows: slice = EVERY) -> Tensor:
    """Pair (i, j) is attended iff dense attention attends to it (`dense_pairs`), and one of these holds: ``i - j <= w``;
    ``j < sink_tokens``; ``i < dense_below``; query ``i`` reads the group of key ``j`` at their distance.

    Args:
        who: the tokens.
        rows: which of the ``Q`` queries to look at.

    Returns:
        bool ``(B, H_kv, R, S)``, or ``(B, H, R, S)`` under an extra mask that has ``H``. Rows of padding are ``False``
        throughout.
    """
    near = near_pairs(who, rows)[:, None]
    pairs = near | read_pairs(who, rows)
    allowed = dense_pairs(who, rows)
    if allowed.shape[1] > pairs.shape[1]:
        pairs = pairs.repeat_interleave(allowed.shape[1] // pairs.shape[1], dim=1)
    return allowed & pairs


def dense_pairs(who: WhoAttends, rows: slice = EVERY) -> Tensor:
    """Pairs of dense attention, whatever the groups: ``j <= i``, of one document, and allowed by the model's own mask.

    Returns:
        bool ``(B, 1 or H, R, S)``.
    """
    i, j = _query_positions(who, rows), who.positions[:, None, :]
    pairs = (j <= i) & (j != PADDING)  # and so is i, which is not less
    if who.documents is not None:
        documents = who.documents[:, -who.reads.shape[2] :][:, rows]
        pairs = pairs & (documents[:, :, None] == who.documents[:, None, :])
    if who.extra_mask is None:
        return pairs[:, None]
    return pairs[:, None] & who.extra_mask[:, :, rows]


def near_pairs(who: WhoAttends, rows: slice = EVERY) -> Tensor:
    """Pairs that are attended whatever the groups: within the window, a sink, a query below ``dense_below``.

    Returns:
        bool ``(B, R, S)``; later tokens and padding are not looked at.
    """
    i, j = _query_positions(who, rows), who.positions[:, None, :]
    return (i - j <= who.pattern.local_window) | (j < who.pattern.sink_tokens) | (i < who.pattern.dense_below)


def read_pairs(who: WhoAttends, rows: slice = EVERY) -> Tensor:
    """Pairs of a query and a key whose group it reads at their distance: bool ``(B, H_kv, R, S)``."""
    reads = who.reads[:, :, rows]
    band = bands_of(_query_positions(who, rows) - who.positions[:, None, :], who.pattern)
    cell = who.key_groups.long()[:, :, None, :] * who.pattern.num_bands + band[:, None]
    return reads.flatten(-2).gather(-1, cell.expand(*reads.shape[:3], -1))


def bands_of(distance: Tensor, pattern: Pattern) -> Tensor:
    """The band of each distance, int64; what is nearer than the first band counts as in it."""
    edges = torch.tensor(pattern.band_starts()[1:], device=distance.device)
    return torch.bucketize(distance, edges)


def without_groups(who: WhoAttends) -> WhoAttends:
    """The same tokens, of which nobody reads a group: window and sinks."""
    return replace(who, reads=torch.zeros_like(who.reads))


def _query_positions(who: WhoAttends, rows: slice) -> Tensor:
    """``(B, R, 1)``."""
    return who.positions[:, -who.reads.shape[2] :][:, rows, None]
