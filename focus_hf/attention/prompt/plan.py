"""Which tokens meet in which call: the decomposition of Focus attention into ragged rows.

Every attended pair is in exactly one of these parts:

* ``dense``: queries below ``dense_below`` with everything before them;
* ``groups``: all other pairs that share a group. Sinks belong to every group, which is the same function as "every
  later token may attend to them" (a sink itself only sees sinks). A token in several groups meets some tokens more
  than once; in group ``c`` the pairs that share a lower-numbered group are excluded;
* ``window``: the local pairs left over;
* ``sinks``: the sinks of queries without a group. Where there are such queries, the first ``w + sink_tokens + 1``
  tokens count as ``dense``, which they are: then no sink is in the window of any other query.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..definition import PADDING, WhoAttends
from ..rows import Part, Rows


@dataclass(frozen=True)
class Plan:
    """The parts of one attention call over flat tokens.

    Args:
        dense, groups, window, sinks: see the module; ``None`` where there is nothing of it.
        local_window: ``w``.
        one_group_each: every query but the dense ones is in one row of ``groups`` (or, a sink, in several with the
            same result).
    """

    dense: Part | None
    groups: Part | None
    window: Part | None
    sinks: Part | None
    local_window: int
    one_group_each: bool

    @property
    def num_queries(self) -> int:
        """Queries that are not padding."""
        return sum(part.rows.query_offsets[-1] for part in (self.dense, self.window) if part is not None)

    def computed_pairs(self) -> int:
        """Pairs that an ideal kernel computes for this plan, those it computes only to exclude them included."""
        parts = ((self.dense, None), (self.groups, None), (self.window, self.local_window))
        pairs = sum(_pairs(part.rows, window) for part, window in parts if part is not None)
        return pairs + (0 if self.sinks is None else _all_pairs(self.sinks.rows))


def make_plan(who: WhoAttends, num_queries: int) -> Plan:
    """Plan one call of tokens with memberships; the queries are the last ``num_queries`` tokens of every sequence.

    An extra mask is not read.
    """
    pattern, positions, documents = who.pattern, who.positions, who.documents
    batch, num_keys = positions.shape
    device = positions.device
    real = positions != PADDING
    is_query = torch.zeros(batch, num_keys, dtype=torch.bool, device=device)
    is_query[:, num_keys - num_queries :] = True

    # Flat tokens without padding, in order; segments are the documents of all sequences.
    tokens = real.flatten().nonzero().squeeze(-1)
    segment = torch.arange(batch, device=device)[:, None].expand(batch, num_keys)
    if documents is not None:
        segment = segment * (int(documents.max()) + 1) + documents
    segment = segment.flatten()[tokens]
    position, queried = positions.flatten()[tokens], is_query.flatten()[tokens]
    # A flat key index made into a flat query index: each sequence has num_keys - num_queries fewer.
    query_index = tokens - (tokens // num_keys + 1) * (num_keys - num_queries)

    assert who.memberships is not None
    memberships, is_sink = who.memberships.flatten(0, 1)[tokens], position < pattern.sink_tokens
    dense_below = pattern.dense_below
    alone = queried & ~memberships.any(dim=-1)
    some_alone = bool(alone.any())
    if some_alone:
        dense_below = max(dense_below, pattern.local_window + pattern.sink_tokens + 1)
    below = position < dense_below
    sparse, dense_queries = queried & ~below, queried & below
    dense = None
    if dense_below:
        dense = _part(tokens[below], query_index[below], segment[below], dense_queries[below])

    in_groups = memberships | is_sink[:, None]
    # A sink's results from its rows are equal: as a query it sees nothing but sinks.
    overlap = bool((in_groups.sum(dim=-1)[~is_sink] > 1).any())
    groups = _group_part(tokens, query_index, segment, sparse, in_groups, overlap)
    window = _part(tokens, query_index, segment, sparse, exclude=None if groups is None else in_groups)
    if window is not None and batch == 1 and _are_last(window, num_queries, num_keys):  # views, not copies
        count = window.rows.query_offsets[-1]
        window = replace(window, queries=slice(num_queries - count, num_queries), keys=slice(0, num_keys))
    sinks = None
    if some_alone and pattern.sink_tokens:
        sinks = _sink_part(tokens, query_index, segment, sparse & alone, is_sink)
    return Plan(dense, groups, window, sinks, pattern.local_window, one_group_each=not (overlap or some_alone))


def _group_part(
    tokens: Tensor,
    query_index: Tensor,
    segment: Tensor,
    queried: Tensor,
    in_groups: Tensor,
    overlap: bool,
) -> Part | None:
    group, copy_of = in_groups.T.nonzero(as_tuple=True)
    num_groups = in_groups.shape[-1]
    row = segment[copy_of] * num_groups + group
    if segment.numel() and int(segment[0]) != int(segment[-1]):
        order = torch.argsort(row, stable=True)
        row, group, copy_of = row[order], group[order], copy_of[order]
    exclude = None
    if overlap:
        lower = torch.arange(num_groups, device=group.device) < group[:, None]
        exclude = in_groups[copy_of] & lower
    part = _part(tokens[copy_of], query_index[copy_of], row, queried[copy_of], exclude)
    if part is None or overlap:
        return part
    first_group = in_groups.int().argmax(dim=-1)
    repeated = (group != first_group[copy_of])[queried[copy_of]]
    return replace(part, repeated=repeated)


def _are_last(part: Part, num_queries: int, num_keys: int) -> bool:
    """Whether a part of one sequence has all its keys, and its queries are the last of the sequence."""
    one_row = len(part.rows.key_offsets) == 2  # whose queries are its last tokens
    return part.rows.key_offsets[-1] == num_keys and (one_row or part.rows.query_offsets[-1] == num_queries)


def _sink_part(tokens: Tensor, query_index: Tensor, segment: Tensor, queried: Tensor, is_sink: Tensor) -> Part | None:
    """Queries with all sinks of their document; both sorted by document already."""
    num_rows = int(segment.max()) + 1
    key_counts = torch.bincount(segment[is_sink], minlength=num_rows)
    queried = queried & (key_counts > 0)[segment]  # a sliding cache may have dropped the sinks
    query_counts = torch.bincount(segment[queried], minlength=num_rows)
    used = (query_counts > 0) & (key_counts > 0)
    if not bool(used.any()):
        return None
    rows = Rows(_offsets(query_counts[used]), _offsets(key_counts[used]), tokens.device)
    return Part(query_index[queried], tokens[is_sink & used[segment]], rows)


def _part(
    tokens: Tensor,
    query_index: Tensor,
    row: Tensor,
    queried: Tensor,
    exclude: Tensor | None = None,
) -> Part | None:
    """Tokens sorted by ``row`` as a part; rows without queries are dropped."""
    if not bool(queried.any()):
        return None
    num_rows = int(row.max()) + 1
    query_counts = torch.bincount(row[queried], minlength=num_rows)
    used = query_counts > 0
    if not bool(used.all()):
        keep = used[row]
        tokens, query_index, queried, row = tokens[keep], query_index[keep], queried[keep], row[keep]
        exclude = None if exclude is None else exclude[keep]
    key_counts = torch.bincount(row, minlength=num_rows)[used]
    rows = Rows(_offsets(query_counts[used]), _offsets(key_counts), tokens.device)
    return Part(
        query_index[queried],
        tokens,
        rows,
        None if exclude is None else (exclude[queried], exclude),
    )


def _offsets(counts: Tensor) -> tuple[int, ...]:
    return (0, *counts.cumsum(0).tolist())


def _pairs(rows: Rows, window: int | None) -> int:
    total = 0
    for q, k in rows.lengths():
        queries, keys = q.stop - q.start, k.stop - k.start
        reach = keys if window is None else min(keys, window + 1)
        total += queries * reach if window is not None else queries * (2 * keys - queries + 1) // 2
    return total


def _all_pairs(rows: Rows) -> int:
    return sum((q.stop - q.start) * (k.stop - k.start) for q, k in rows.lengths())
