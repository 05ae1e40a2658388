"""Who may attend to whom: the one definition of Focus attention. Every fast path is tested against it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Position of a token that is padding: it attends to nothing and nothing attends to it.
PADDING = -1


@dataclass(frozen=True)
class Pattern:
    """The numbers that shape the attention pattern besides group memberships.

    Args:
        local_window: ``w``; a pair at distance ``0 <= i - j <= w`` is always attended.
        sink_tokens: the first tokens of a sequence that belong to every group (0 is the paper's method).
        dense_below: queries at positions below it attend to everything before them (0 is the paper's method).
    """

    local_window: int = 128
    sink_tokens: int = 4
    dense_below: int = 0

    @property
    def dense_length(self) -> int:
        """Sequences of at most this many tokens have all their pairs attended: they are dense attention."""
        return max(self.local_window + 1, self.dense_below)


def attended_pairs(
    pattern: Pattern,
    query_positions: Tensor,
    key_positions: Tensor,
    query_memberships: Tensor,
    key_memberships: Tensor,
    query_documents: Tensor | None = None,
    key_documents: Tensor | None = None,
) -> Tensor:
    """Pair (i, j) is attended iff both are of one document, ``j <= i``, and one of these holds: ``i - j <= w``;
    ``j < sink_tokens``; ``i < dense_below``; they share a group.

    Args:
        pattern: window, sinks, dense start.
        query_positions: ``(B, Q)`` integers, a token's place in its document; ``PADDING`` for padding.
        key_positions: ``(B, S)``, likewise.
        query_memberships: ``(B, Q, K)`` bool.
        key_memberships: ``(B, S, K)`` bool.
        query_documents: ``(B, Q)`` integers, which of several documents packed into a row; ``None`` for one.
        key_documents: ``(B, S)``, likewise.

    Returns:
        bool ``(B, Q, S)``. Rows of padding are ``False`` throughout.
    """
    i, j = query_positions[:, :, None], key_positions[:, None, :]
    allowed = (j <= i) & (j != PADDING) & (i != PADDING)
    if query_documents is not None and key_documents is not None:
        allowed &= query_documents[:, :, None] == key_documents[:, None, :]
    local = i - j <= pattern.local_window
    sink = j < pattern.sink_tokens
    dense = i < pattern.dense_below
    return allowed & (local | sink | dense | share_a_group(query_memberships, key_memberships))


def training_pairs(
    pattern: Pattern,
    positions: Tensor,
    rows: slice,
    columns: slice,
    documents: Tensor | None = None,
    extra_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Some queries of whole sequences and the keys before them, as training looks at them, whatever the groups.

    Args:
        pattern: window, sinks, dense start.
        positions: ``(B, T)`` integers, ``PADDING`` for padding.
        rows, columns: which queries and keys.
        documents, extra_mask: see `masked_focus_attention`.

    Returns:
        bool: pairs that dense attention attends to, ``(B, 1 or H, Q, S)``, and pairs that groups decide about (beyond
        the window, no sink, no query below ``dense_below``), ``(B, Q, S)``.
    """
    i, j = positions[:, rows, None], positions[:, None, columns]
    allowed = ((j <= i) & (j != PADDING) & (i != PADDING))[:, None]
    if documents is not None:
        allowed = allowed & (documents[:, rows, None] == documents[:, None, columns])[:, None]
    if extra_mask is not None:
        allowed = allowed & extra_mask[:, :, rows, columns]
    distant = (i - j > pattern.local_window) & (j >= pattern.sink_tokens) & (i >= pattern.dense_below)
    return allowed, distant


def share_a_group(a: Tensor, b: Tensor) -> Tensor:
    """Whether tokens have a group in common: ``(..., Q, K)`` and ``(..., S, K)`` bool to ``(..., Q, S)`` bool."""
    return torch.matmul(a.float(), b.float().transpose(-1, -2)) > 0


def count_pairs(pattern: Pattern, memberships: Tensor, chunk: int = 1024) -> tuple[int, int]:
    """Pairs attended and pairs possible (all ``j <= i``) in a batch of unpadded sequences.

    Their ratio is the most that sparsity can save; it is a count of pairs, not of memberships.

    Args:
        pattern: window, sinks, dense start.
        memberships: ``(B, T, K)`` bool.
        chunk: queries looked at together; bounds memory at ``B * chunk * T`` bytes.
    """
    batch, length, _ = memberships.shape
    positions = torch.arange(length, device=memberships.device).expand(batch, length)
    attended = 0
    for start in range(0, length, chunk):
        rows = slice(start, start + chunk)
        pairs = attended_pairs(pattern, positions[:, rows], positions, memberships[:, rows], memberships)
        attended += int(pairs.sum())
    return attended, batch * length * (length + 1) // 2
