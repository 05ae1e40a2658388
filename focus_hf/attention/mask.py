"""Who may attend to whom: the one definition of Focus attention. Every fast path is tested against it."""

from __future__ import annotations

from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class Known:
    """What the host knows about all tokens of a call without looking at them, so that it can choose shapes for them.

    Args:
        groups_each: every token is in exactly this many groups; ``None`` if that is not known.
        documents_each: packed into a row, at most.
        unpadded: no token is padding.
        reads_each: every query reads exactly this many groups; ``None`` if that is not known.
        first_position: of a row's first token, where nothing is padding.
    """

    groups_each: int | None
    documents_each: int = 1
    unpadded: bool = False
    reads_each: int | None = None
    first_position: int = 0


@dataclass(frozen=True)
class WhoAttends:
    """What decides who attends to whom among ``S`` tokens, of which the last ``Q`` are queries.

    Args:
        pattern: window, sinks, dense start.
        positions: ``(B, S)`` integers, a token's rank in its document, ``PADDING`` for padding anywhere.
        memberships: ``(B, S, K)`` bool, any number of groups per token; a token in none has window and sinks.
            ``K`` may be 0.
        documents: ``(B, S)`` integers that never fall along a sequence, which of several documents packed into it;
            ``None`` for one each.
        extra_mask: bool ``(B, 1 or H, Q, S)``, pairs that the model itself allows, for anything beyond causality,
            padding and documents (a sliding window).
        reads: ``(B, S, K)`` bool, the groups whose keys a token attends to as a query, where these are not the groups
            that it belongs to as a key; ``None`` where they are.
        known: what holds for all of them, or ``None``. It changes nothing about who attends, only what has to be asked
            of the device.
    """

    pattern: Pattern
    positions: Tensor
    memberships: Tensor
    documents: Tensor | None = None
    extra_mask: Tensor | None = None
    reads: Tensor | None = None
    known: Known | None = None

    @property
    def is_plain(self) -> bool:
        """It is known, without looking, that every row is one document and nothing is padding."""
        return self.known is not None and self.known.unpadded and self.documents is None

    def sequence(self, row: int) -> WhoAttends:
        """One sequence of the batch, as a batch of one."""
        one = slice(row, row + 1)
        return WhoAttends(
            self.pattern,
            self.positions[one],
            self.memberships[one],
            None if self.documents is None else self.documents[one],
            None if self.extra_mask is None else self.extra_mask[one],
            None if self.reads is None else self.reads[one],
            self.known,
        )

    def without_groups(self) -> WhoAttends:
        """The same tokens, none of them in any group: window and sinks."""
        none = self.positions.new_zeros((*self.positions.shape, 0), dtype=torch.bool)
        known = None if self.known is None else replace(self.known, groups_each=0)
        return replace(self, memberships=none, reads=None, known=known)


#: All tokens.
EVERY = slice(None)


def attended_pairs(who: WhoAttends, rows: slice = EVERY, columns: slice = EVERY) -> Tensor:
    """Pair (i, j) is attended iff dense attention attends to it (`dense_pairs`), and one of these holds:
    ``i - j <= w``; ``j < sink_tokens``; ``i < dense_below`` (or else it is one of the `distant_pairs`); they share a
    group (a group of the key is one of those that the query reads).

    Args:
        who: the tokens.
        rows, columns: which of them to look at as queries and as keys.

    Returns:
        bool ``(B, 1 or H, R, C)``, with ``H`` only under an extra mask that has it. Rows of padding are ``False``
        throughout.
    """
    reads = who.memberships if who.reads is None else who.reads
    shared = share_a_group(reads[:, rows], who.memberships[:, columns])
    return dense_pairs(who, rows, columns) & (shared | near_pairs(who, rows, columns))[:, None]


def dense_pairs(who: WhoAttends, rows: slice = EVERY, columns: slice = EVERY) -> Tensor:
    """Pairs of dense attention, whatever the groups: ``j <= i``, of one document, and allowed by the model's own mask.

    Arguments and result as for `attended_pairs`.
    """
    i, j = who.positions[:, rows, None], who.positions[:, None, columns]
    pairs = j <= i
    if who.known is None or not who.known.unpadded:
        pairs &= j != PADDING  # and so is i, which is not less
    if who.documents is not None:
        pairs &= who.documents[:, rows, None] == who.documents[:, None, columns]
    if who.extra_mask is None:
        return pairs[:, None]
    num_queries, num_keys = who.extra_mask.shape[-2:]
    first, stop, _ = rows.indices(num_keys)
    earlier = num_keys - num_queries
    return pairs[:, None] & who.extra_mask[:, :, first - earlier : stop - earlier, columns]


def near_pairs(who: WhoAttends, rows: slice = EVERY, columns: slice = EVERY) -> Tensor:
    """Pairs that are attended whatever the groups: within the window, a sink, a query below ``dense_below``.

    Returns:
        bool ``(B, R, C)``; later tokens and padding are not looked at.
    """
    return are_near(who.positions[:, rows, None], who.positions[:, None, columns], who.pattern)


def are_near(
    i: Tensor, j: Tensor, pattern: Pattern, local_window: Tensor | None = None, dense_below: Tensor | None = None
) -> Tensor:
    """`near_pairs` of queries at positions ``i`` and keys at ``j``.

    Args:
        i, j: integers that broadcast.
        pattern: window, sinks, dense start.
        local_window, dense_below: in the place of the pattern's, where not all pairs have the same.
    """
    near = i - j <= (pattern.local_window if local_window is None else local_window)
    if pattern.sink_tokens:
        near |= j < pattern.sink_tokens
    if dense_below is not None or pattern.dense_below:
        near |= i < (pattern.dense_below if dense_below is None else dense_below)
    return near


def distant_pairs(who: WhoAttends, rows: slice = EVERY, columns: slice = EVERY) -> Tensor:
    """Pairs that groups decide about: those that are not near. Arguments and result as for `near_pairs`."""
    return ~near_pairs(who, rows, columns)


def share_a_group(a: Tensor, b: Tensor) -> Tensor:
    """Whether tokens have a group in common: ``(..., Q, K)`` and ``(..., S, K)`` bool to ``(..., Q, S)`` bool."""
    if a.shape[-2] == 1 and _in_words(a) and _in_words(b):
        met = a.view(torch.int64) & b.view(torch.int64)  # not negative: a byte is 0 or 1
        return ((met.squeeze(-1) if met.shape[-1] == 1 else met.amax(dim=-1)) != 0)[..., None, :]
    return torch.matmul(a.float(), b.float().transpose(-1, -2)) > 0


def _in_words(groups: Tensor) -> bool:
    """Whether eight groups at a time can be looked at as one integer: a third of the time for one query."""
    strides = (groups.shape[-1] or 1, groups.storage_offset(), *groups.stride()[:-1])
    return groups.dtype == torch.bool and groups.stride(-1) == 1 and not any(number % 8 for number in strides)


def count_pairs(pattern: Pattern, memberships: Tensor, chunk: int = 1024) -> tuple[int, int]:
    """Pairs attended and pairs possible (all ``j <= i``) in a batch of unpadded sequences.

    Their ratio is the most that sparsity can save; it is a count of pairs, not of memberships.

    Args:
        pattern: window, sinks, dense start.
        memberships: ``(B, T, K)`` bool.
        chunk: queries looked at together; bounds memory at ``B * chunk * T`` bytes.
    """
    batch, length, _ = memberships.shape
    who = WhoAttends(pattern, torch.arange(length, device=memberships.device).expand(batch, length), memberships)
    attended = 0
    for start in range(0, length, chunk):
        attended += int(attended_pairs(who, slice(start, start + chunk)).sum())
    return attended, batch * length * (length + 1) // 2
