"""Who may attend to whom: the one definition of Focus attention. Every fast path is tested against it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

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
        reads: bool ``(B, H_c, Q, K, bands)``: a query attends to the keys of a group at a distance. ``H_c``, who
            chooses (`focus_hf.routing.cells`), is ``H_kv`` or a multiple of it that divides ``H``.
        documents: ``(B, S)`` integers that never fall along a sequence, which of several documents packed into it;
            ``None`` for one each.
        extra_mask: bool ``(B, 1 or H, Q, S)``, pairs that the model itself allows, for anything beyond causality,
            padding and documents (a sliding window).
        first_position: of every row's first token, where it is known without looking that every row is one document
            and nothing is padding; else ``None``. It changes nothing about who attends.
        memberships: bool ``(B, S, K)``, with the paper's routing that all heads share: a query reads the keys that it
            has a group in common with. ``key_groups`` and ``reads`` say the same (`by_memberships`); what computes by
            groups of tokens, or gives them a gradient, wants it so.
    """

    pattern: Pattern
    positions: Tensor
    key_groups: Tensor
    reads: Tensor
    documents: Tensor | None = None
    extra_mask: Tensor | None = None
    first_position: int | None = None
    memberships: Tensor | None = None

    @property
    def num_queries(self) -> int:
        """``Q``."""
        return self.reads.shape[2]

    def sequence(self, row: int) -> WhoAttends:
        """One sequence of the batch, as a batch of one."""
        tensors: dict[str, Any] = {n: x[row : row + 1] for n, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **tensors)


def attended_pairs(who: WhoAttends, rows: slice = EVERY, columns: slice = EVERY) -> Tensor:
    """Pair (i, j) is attended iff dense attention attends to it (`dense_pairs`), and one of these holds:
    ``i - j <= w``; ``j < sink_tokens``; ``i < dense_below``; ``i`` reads the group of key ``j`` at their distance.

    Args:
        who: the tokens.
        rows: which of the ``Q`` queries to look at.
        columns: which of the ``S`` keys.

    Returns:
        bool ``(B, H_c, R, C)``, or ``(B, H, R, C)`` under an extra mask that has ``H``; of stride 0 where one head
        stands for all. Rows of padding are ``False`` throughout.
    """
    pairs = near_pairs(who, rows, columns)[:, None] | read_pairs(who, rows, columns)
    allowed = dense_pairs(who, rows, columns)
    if allowed.shape[1] > pairs.shape[1]:
        pairs = pairs.repeat_interleave(allowed.shape[1] // pairs.shape[1], dim=1)
    return (allowed & pairs).expand(-1, max(who.reads.shape[1], allowed.shape[1]), -1, -1)


def dense_pairs(who: WhoAttends, rows: slice = EVERY, columns: slice = EVERY) -> Tensor:
    """Pairs of dense attention, whatever the groups: ``j <= i``, of one document, and allowed by the model's own mask.

    Returns:
        bool ``(B, 1 or H, R, C)``.
    """
    i, j = _query_positions(who, rows), who.positions[:, None, columns]
    pairs = j <= i
    if who.first_position is None:
        pairs = pairs & (j != PADDING)  # and so is i, which is not less
    if who.documents is not None:
        documents = who.documents[:, -who.num_queries :][:, rows]
        pairs = pairs & (documents[:, :, None] == who.documents[:, None, columns])
    if who.extra_mask is None:
        return pairs[:, None]
    return pairs[:, None] & who.extra_mask[:, :, rows, columns]


def near_pairs(who: WhoAttends, rows: slice = EVERY, columns: slice = EVERY) -> Tensor:
    """Pairs that are attended whatever the groups: within the window, a sink, a query below ``dense_below``.

    Returns:
        bool ``(B, R, C)``; later tokens and padding are not looked at.
    """
    i, j, pattern = _query_positions(who, rows), who.positions[:, None, columns], who.pattern
    near = i - j <= pattern.local_window
    if pattern.sink_tokens:
        near |= j < pattern.sink_tokens
    if pattern.dense_below:
        near |= i < pattern.dense_below
    return near


def read_pairs(who: WhoAttends, rows: slice = EVERY, columns: slice = EVERY) -> Tensor:
    """Pairs of a query and a key whose group it reads at their distance: bool ``(B, 1 or H_c, R, C)``."""
    reads, cell = one_head(who.reads)[:, :, rows], one_head(who.key_groups)[:, :, None, columns]
    if who.pattern.num_bands > 1:
        distance = _query_positions(who, rows) - who.positions[:, None, columns]
        cell = torch.add(bands_of(distance, who.pattern)[:, None], cell, alpha=who.pattern.num_bands)
    heads = max(reads.shape[1], cell.shape[1])
    if 1 < cell.shape[1] < heads:
        cell = cell.repeat_interleave(heads // cell.shape[1], dim=1)
    cell = cell.long().expand(-1, heads, reads.shape[2], -1)
    return reads.flatten(-2).expand(-1, heads, -1, -1).gather(-1, cell)


def one_head(tensor: Tensor) -> Tensor:
    """One head of ``(B, heads, ...)`` where it stands for all of them (stride 0), else the tensor."""
    return tensor[:, :1] if tensor.stride(1) == 0 else tensor


def of_all_heads(groups: Tensor, reads: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Groups ``(B, 1 or H_kv, S)`` and reads ``(B, 1 or H_c, Q, K, bands)`` with one head standing for all."""
    return groups.expand(-1, kv_heads, -1), reads.expand(-1, max(kv_heads, reads.shape[1]), -1, -1, -1)


def read_by_any(reads: Tensor, kv_heads: int) -> Tensor:
    """What is read by any chooser of a key/value head: bool ``(B, H_kv, Q, K, bands)``; its keys are loaded once."""
    return reads if reads.shape[1] == kv_heads else reads.unflatten(1, (kv_heads, -1)).any(dim=2)


def bands_of(distance: Tensor, pattern: Pattern) -> Tensor:
    """The band of each distance, int64; what is nearer than the first band counts as in it."""
    band = torch.zeros_like(distance, dtype=torch.int64)
    for start in pattern.band_starts()[1:]:
        band += distance > start
    return band


def by_memberships(memberships: Tensor, num_queries: int) -> tuple[Tensor, Tensor]:
    """The paper's routing as key groups and reads: a query reads the keys that it has a group in common with.

    With one group each these are the groups. Otherwise a key's *set* of groups is one of a list of sets, and a query
    reads the sets that meet its own: no pair is met twice.

    Args:
        memberships: bool ``(B, S, K)``, any number of groups for each token; the queries are the last ones.
        num_queries: ``Q``.

    Returns:
        Groups ``(B, 1, S)``, uint8 (int32 where there are more than 256), and reads, bool ``(B, 1, Q, sets, 1)``.
    """
    batch, length, num_groups = memberships.shape
    tokens = memberships.flatten(0, 1) if num_groups else memberships.new_zeros(batch * length, 1)
    sets, group = torch.unique(tokens, dim=0, return_inverse=True)
    meets = (sets.float() @ sets.float().T) > 0
    group = group.view(batch, 1, length)
    reads = meets[group[:, :, length - num_queries :]][..., None]
    return group.to(torch.uint8 if len(sets) <= 256 else torch.int32), reads


def share_a_group(a: Tensor, b: Tensor) -> Tensor:
    """Whether tokens have a group in common: ``(..., Q, K)`` and ``(..., S, K)`` bool to ``(..., Q, S)`` bool."""
    return torch.matmul(a.float(), b.float().transpose(-1, -2)) > 0


def without_groups(who: WhoAttends) -> WhoAttends:
    """The same tokens, of which nobody reads a group: window and sinks."""
    none = who.positions.new_zeros((*who.positions.shape, 0), dtype=torch.bool)
    return replace(
        who,
        reads=torch.zeros_like(who.reads[..., :1, :1]),
        key_groups=torch.zeros_like(who.key_groups),
        pattern=replace(who.pattern, num_bands=1),
        memberships=none,
    )


def sequences(who: WhoAttends) -> Iterator[tuple[int, Tensor | slice, Tensor | slice]]:
    """Every document that has queries, without padding: its row in the batch, its tokens, and its queries.

    Yields:
        Indices of the tokens in ``0 .. S - 1``, and of those that are queries in ``0 .. Q - 1``.
    """
    positions, documents, num_queries = who.positions, who.documents, who.num_queries
    num_keys = positions.shape[1]
    first_query = num_keys - num_queries
    if who.first_position is not None and documents is None:
        yield from ((row, slice(0, num_keys), slice(0, num_queries)) for row in range(positions.shape[0]))
        return
    for row in range(positions.shape[0]):
        real = positions[row] != PADDING
        if documents is None and bool(real.all()):
            yield row, slice(0, num_keys), slice(0, num_queries)
            continue
        tokens = real.nonzero().squeeze(-1)
        counts = (
            [tokens.shape[0]]
            if documents is None
            else documents[row, tokens].unique_consecutive(return_counts=True)[1].tolist()
        )
        for document in tokens.split(counts):
            queries = document[document >= first_query] - first_query
            if queries.numel():
                yield row, document, queries


def _query_positions(who: WhoAttends, rows: slice) -> Tensor:
    """``(B, R, 1)``."""
    return who.positions[:, -who.num_queries :][:, rows, None]
