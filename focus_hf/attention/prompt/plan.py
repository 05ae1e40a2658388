"""Which tokens meet in which call: the decomposition of Focus attention into ragged rows.

Every attended pair is in exactly one of these parts:

* *dense*: queries below ``dense_below`` with everything before them;
* *window*: the local pairs that share no group;
* *groups*: all other pairs that share a group. Sinks belong to every group, which is the same function as "every
  later token may attend to them" (a sink itself only sees sinks, and asks in the first group). A token in several
  groups meets some tokens more than once; in group ``c`` the pairs that share a lower-numbered group are excluded;
* *sinks*: the sinks of queries without a group. Where there are such queries, the first ``w + sink_tokens + 1``
  tokens count as dense, which they are: then no sink is in the window of any other query.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..definition import PADDING
from ..kernels import Call, Rows
from ..problem import Problem


@dataclass(frozen=True)
class Part:
    """A part of the attended pairs: a kernel call, and the tokens in it.

    Args:
        queries: indices of the call's queries into the flat queries ``B * Q``, each at most once.
        keys: likewise into the flat keys ``B * S``.
        call: the pairs among them.
        is_first: no part before it has any of its queries.
    """

    queries: Tensor
    keys: Tensor
    call: Call
    is_first: bool = False

    def split(self, window_queries: int | None = None) -> Iterator[Part]:
        """One part for each row; of a window one for each so many of its queries, with the keys that they see."""
        window, exclude = self.call.window, self.call.exclude
        for q, k in self.call.rows.lengths():
            step = q.stop - q.start if window is None or window_queries is None else window_queries
            for start in range(q.start, q.stop, step):
                queries = slice(start, min(start + step, q.stop))
                end = k.stop - (q.stop - queries.stop)
                first = k.start if window is None else max(k.start, end - (queries.stop - start) - window)
                keys = slice(first, end)
                own = replace(
                    self.call,
                    rows=Rows.single(queries.stop - start, end - first, self.keys.device),
                    exclude=None if exclude is None else (exclude[0][queries], exclude[1][keys]),
                )
                yield Part(self.queries[queries], self.keys[keys], own, self.is_first)

    def computed_pairs(self) -> int:
        """Pairs that an ideal kernel computes for it, those it computes only to exclude them included."""
        total = 0
        for q, k in self.call.rows.lengths():
            queries, keys = q.stop - q.start, k.stop - k.start
            if self.call.window is not None:
                total += queries * min(keys, self.call.window + 1)
            else:
                total += queries * (2 * keys - queries + 1) // 2 if self.call.causal else queries * keys
        return total


@dataclass(frozen=True)
class _Tokens:
    """Flat tokens without padding, in order.

    Args:
        keys: ``(N,)``, where they are among the ``B * S`` keys.
        queries: likewise among the ``B * Q`` queries, for those that are.
        segment: integers, which document of which sequence.
        scale: of the scores.
    """

    keys: Tensor
    queries: Tensor
    segment: Tensor
    scale: float

    def part(
        self,
        asking: Tensor,
        asked: Tensor,
        rows: tuple[Tensor, Tensor] | None = None,
        exclude: tuple[Tensor, Tensor] | None = None,
        is_first: bool = False,
        **how: Any,
    ) -> list[Part]:
        """The part of some queries and keys, without rows that lack one of them; no part where nothing is left.

        Args:
            asking, asked: which tokens, by row.
            rows: of the two, integers; by default their segments.
            exclude: columns of the two, see `Call`.
            is_first: see `Part`.
            how: further fields of the `Call`.
        """
        if not asking.numel():
            return []
        of_queries, of_keys = (self.segment[asking], self.segment[asked]) if rows is None else rows
        num_rows = int(torch.cat([of_queries, of_keys]).max()) + 1
        counts = [torch.bincount(row, minlength=num_rows) for row in (of_queries, of_keys)]
        used = (counts[0] > 0) & (counts[1] > 0)  # a sliding cache may have dropped the sinks
        if not bool(used.any()):
            return []
        q, k = used[of_queries], used[of_keys]
        edges, key_edges = ((0, *count[used].cumsum(0).tolist()) for count in counts)
        excluded = None if exclude is None else (exclude[0][q], exclude[1][k])
        call = Call(Rows(edges, key_edges, asked.device), self.scale, exclude=excluded, **how)
        return [Part(self.queries[asking[q]], self.keys[asked[k]], call, is_first)]


def make_plan(problem: Problem) -> list[Part]:
    """The parts of a problem whose tokens have memberships. An extra mask is not read."""
    who, pattern, num_queries = problem.who, problem.who.pattern, problem.num_queries
    num_keys = problem.num_keys
    keys = (who.positions != PADDING).flatten().nonzero().squeeze(-1)
    position, sequence = who.positions.flatten()[keys], keys // num_keys
    segment = sequence
    if who.documents is not None:
        segment = sequence * (int(who.documents.max()) + 1) + who.documents.flatten()[keys]
    # A flat key index made into a flat query index: each sequence has num_keys - num_queries fewer.
    tokens = _Tokens(keys, keys - (sequence + 1) * (num_keys - num_queries), segment, problem.scores.scale)
    queried = keys % num_keys >= num_keys - num_queries

    assert who.memberships is not None
    memberships, is_sink = who.memberships.flatten(0, 1)[keys], position < pattern.sink_tokens
    alone, dense_below = queried & ~memberships.any(dim=-1), pattern.dense_below
    some_alone = bool(alone.any())
    if some_alone:
        dense_below = max(dense_below, pattern.local_window + pattern.sink_tokens + 1)
    below, in_groups = position < dense_below, memberships | is_sink[:, None]
    sparse = queried & ~below

    asks, every = sparse.nonzero().squeeze(-1), torch.arange(keys.shape[0], device=keys.device)
    parts = []
    if dense_below:
        parts = tokens.part((queried & below).nonzero().squeeze(-1), below.nonzero().squeeze(-1), is_first=True)
    shared = (in_groups[asks], in_groups) if in_groups.shape[-1] else None
    parts += tokens.part(asks, every, exclude=shared, is_first=True, window=pattern.local_window)

    group, token = in_groups.T.nonzero(as_tuple=True)
    row = segment[token] * in_groups.shape[-1] + group
    row, order = row.sort(stable=True)
    group, token = group[order], token[order]
    asking = sparse[token] & ((group == 0) | ~is_sink[token])
    if bool((in_groups.sum(dim=-1)[~is_sink] > 1).any()):
        lower = in_groups[token] & (torch.arange(in_groups.shape[-1], device=keys.device) < group[:, None])
        for groups in tokens.part(token[asking], token, (row[asking], row), (lower[asking], lower)):
            parts += groups.split()  # a query is in several rows
    else:
        parts += tokens.part(token[asking], token, (row[asking], row))
    if some_alone and pattern.sink_tokens:
        parts += tokens.part((sparse & alone).nonzero().squeeze(-1), is_sink.nonzero().squeeze(-1), causal=False)
    return parts
