"""Prompts on a CPU: a block of consecutive queries attends to the keys that any of them reads, and to no others.

Consecutive queries read much the same, so keys are gathered once for all of them, and what is not each one's own is
hidden by a bias. To all queries of a block most keys are at distances of one band: what they read of such a key is a
row of a table, by the key's group and that band. The others are few and stand at the same distances from every block
(those in the window, and about each distance at which a band begins): each is a row of its own. Lists of keys that are
about as long are attended together.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..definition import Pattern, bands_of, sequences
from ..kernels import Call, CpuFlash, Rows, cpu_flash
from ..problem import Problem

#: Rows of a block: its queries, once for each query head of a key head.
ROWS = 96

#: Lists of keys (one for each head and block) that are made together; bounds memory at ``16 * S * LISTS`` bytes or so.
LISTS = 48

#: Keys of several lists that are attended in one call: few enough to stay in a processor's cache.
KEYS = 4096


def blocked_focus_attention(problem: Problem) -> Tensor:
    """Hard Focus attention on CPU, for any groups and reads.

    Args:
        problem: what to compute, with plain scores, without sink logits, and ``D_v <= D``.

    Returns:
        ``(B, H, Q, D_v)``; zeros for padding. It has no gradient.
    """
    who = problem.who
    output = problem.query.new_zeros(*problem.query.shape[:3], problem.value.shape[-1])
    for row, tokens, queries in sequences(who):
        document = _Document(
            query=_some(problem.query[row], queries),
            reads=_some(who.reads[row], queries),
            key=_some(problem.key[row], tokens).contiguous(),
            value=_some(problem.value[row], tokens).contiguous(),
            groups=_some(who.key_groups[row], tokens),
            pattern=who.pattern,
            first=int(who.positions[row, tokens][0]) if who.first_position is None else who.first_position,
            scale=problem.scores.scale,
        )
        output[row, :, queries] = document.attend()
    return output


def _some(tokens: Tensor, index: Tensor | slice) -> Tensor:
    """Those of the second dimension; all of them for a slice."""
    return tokens if isinstance(index, slice) else tokens.index_select(1, index)


@dataclass(frozen=True)
class _Document:
    """One document without padding.

    Args:
        query: ``(H, Q, D)``.
        reads: ``(H_kv, Q, K, bands)``.
        key, value: ``(H_kv, S, D)``, ``(H_kv, S, D_v)``, contiguous.
        groups: ``(H_kv, S)``.
        pattern, first, scale: see `WhoAttends`, `Scores`; ``first`` is the position of the first token.
    """

    query: Tensor
    reads: Tensor
    key: Tensor
    value: Tensor
    groups: Tensor
    pattern: Pattern
    first: int
    scale: float

    def attend(self) -> Tensor:
        """``(H, Q, D_v)``."""
        num_queries, kv_heads = self.query.shape[1], self.key.shape[0]
        output = self.query.new_empty(*self.query.shape[:2], self.value.shape[-1])
        earlier = self.key.shape[1] - num_queries
        start = min(max(self.pattern.dense_below - self.first - earlier, 0), num_queries)
        if start:
            call = Call(Rows.single(start, earlier + start, self.query.device), self.scale)
            k, v = (x[:, : earlier + start].transpose(0, 1) for x in (self.key, self.value))
            dense, _ = CpuFlash().forward(self.query[:, :start].transpose(0, 1), k, v, call)
            output[:, :start] = dense.transpose(0, 1)
        size = max(8, ROWS * kv_heads // self.query.shape[0] // 8 * 8)
        while start < num_queries:
            own = min(size, num_queries - start)
            count = max(1, min(LISTS // kv_heads, (num_queries - start) // own))
            rows, first = slice(start, start + count * own), earlier + start + own * torch.arange(count)
            self._blocks(output[:, rows], self.query[:, rows], self.reads[:, rows].unflatten(1, (count, own)), first)
            start += count * own
        return output

    def _blocks(self, output: Tensor, query: Tensor, reads: Tensor, first: Tensor) -> None:
        """Some blocks of queries next to each other.

        Args:
            output: ``(H, blocks * size, D_v)``, is written.
            query: ``(H, blocks * size, D)``.
            reads: ``(H_kv, blocks, size, K, bands)``.
            first: where blocks begin, ``(blocks,)``.
        """
        kv_heads, count, size = reads.shape[:3]
        lists = self._lists(reads, first)
        table = (~lists.visible).to(query.dtype).mul_(torch.finfo(query.dtype).min)
        keys, values = (x.flatten(0, 1) for x in (self.key, self.value))
        queries, outputs = (x.unflatten(0, (kv_heads, -1)).unflatten(2, (count, size)) for x in (query, output))
        for some, place in lists.of_like_length():
            column, row = (x.index_select(0, place.view(-1)) for x in (lists.keys, lists.rows))
            k, v = (x.index_select(0, column).view(*place.shape, 1, -1) for x in (keys, values))
            bias = table.index_select(0, row).view(*place.shape, size).transpose(1, 2).contiguous()
            head, block = some // count, some % count
            found, _ = cpu_flash(queries[head, :, block].transpose(1, 2), k, v, self.scale, bias=bias[:, None])
            outputs[head, :, block] = found.transpose(1, 2)

    def _lists(self, reads: Tensor, first: Tensor) -> _Lists:
        """What blocks read; see `_blocks`."""
        (kv_heads, count, size), slots = reads.shape[:3], self.pattern.num_bands + 1
        last = int(first[-1])
        layout = _layout(self.pattern, size, 1 << last.bit_length())
        sinks = torch.arange(min(max(0, self.pattern.sink_tokens - self.first), last + size))
        far = torch.arange(len(sinks), max(len(sinks), last - self.pattern.local_window))
        near = first[:, None] - layout.distances
        is_there, near = (near >= len(sinks))[:, None], near.clamp_(min=0)

        # The rows of a table: cells, a slot that nobody reads behind the bands of each group; near keys; sinks.
        of_cells = F.pad(reads.permute(0, 1, 3, 4, 2), (0, 0, 0, 1)).flatten(2, 3)
        own_cells = torch.add(layout.bands, self.groups[:, near][:, :, None], alpha=self.pattern.num_bands)
        of_near = (reads.flatten(3).gather(3, own_cells) | layout.in_window) & is_there & ~layout.later
        of_sinks = (sinks[:, None] <= first[:, None, None] + torch.arange(size)).expand(kv_heads, -1, -1, -1)
        visible = torch.cat([of_cells, of_near.transpose(2, 3), of_sinks], dim=2)
        keys = torch.cat([x.expand(count, -1) for x in (far, near, sinks)], dim=1)
        slot = layout.slots[(first[:, None] - far).clamp_(min=0)]
        cell = torch.add(slot, self.groups[:, None, len(sinks) : len(sinks) + len(far)], alpha=slots)
        own_row = torch.arange(of_cells.shape[2], visible.shape[2]).expand(kv_heads, count, -1)
        return _Lists.of(visible, keys, torch.cat([cell, own_row], dim=2), self.key.shape[1], nobody=slots - 1)


@dataclass(frozen=True)
class _Lists:
    """The keys that any query of a block reads: a list for each head and block, head by head.

    Args:
        ends: where they end among the following, behind a 0: ``(lists + 1,)``.
        keys: ``(N + 1,)``, among the ``H_kv * S``; the last one fills up shorter lists.
        rows: ``(N + 1,)``, what queries see of a key is this row of the following.
        visible: bool ``(rows, size)``.
    """

    ends: Tensor
    keys: Tensor
    rows: Tensor
    visible: Tensor

    @classmethod
    def of(cls, visible: Tensor, keys: Tensor, rows: Tensor, length: int, nobody: int) -> _Lists:
        """Of tables bool ``(H_kv, blocks, R, size)``, keys ``(blocks, C)`` of ``length``, and the row of each key
        ``(H_kv, blocks, C)``; ``nobody`` is a row that no query sees."""
        kv_heads, count, _, size = visible.shape
        together = visible.view(torch.int64) if size % 8 == 0 else visible  # eight bytes at once
        found = together.any(dim=-1).gather(2, rows).view(-1).nonzero().squeeze(-1)
        width = keys.shape[1]
        ends = torch.searchsorted(found, width * torch.arange(kv_heads * count + 1))
        row = rows.view(-1).index_select(0, found)
        key = keys.view(-1).index_select(0, found % keys.numel())
        row += found.div(width, rounding_mode="floor") * visible.shape[2]
        key += found.div(keys.numel(), rounding_mode="floor") * length
        return cls(ends, F.pad(key, (0, 1)), F.pad(row, (0, 1), value=nobody), visible.flatten(0, 2))

    def of_like_length(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Lists that are about as long, together: which, ``(n,)``, and where their keys are, ``(n, longest)``."""
        lengths = self.ends.diff()
        order = lengths.argsort()
        start, sizes = 0, lengths[order].tolist()
        while start < len(sizes):
            stop = start + 1
            while stop < len(sizes) and sizes[stop] * (stop + 1 - start) <= KEYS:
                stop += 1
            some, each = order[start:stop], torch.arange(sizes[stop - 1])
            place = self.ends[some][:, None] + each
            yield some, place.masked_fill_(each >= lengths[some][:, None], self.keys.shape[0] - 1)
            start = stop


@dataclass(frozen=True)
class _Layout:
    """What is the same for every block of some size; distances are from its first query, negative for later keys.

    Args:
        slots: ``(length,)``, by distance: the band, or ``num_bands`` where a block's queries do not agree on it.
        distances: ``(F,)``, at which they do not.
        bands: ``(size, F)``, the band of each query at those.
        in_window, later: bool ``(size, F)``, within the window; a later token.
    """

    slots: Tensor
    distances: Tensor
    bands: Tensor
    in_window: Tensor
    later: Tensor


@functools.lru_cache(maxsize=32)
def _layout(pattern: Pattern, size: int, length: int) -> _Layout:
    with torch.inference_mode(False):
        distance = torch.arange(length)
        slots = bands_of(distance, pattern)
        agree = (distance > pattern.local_window) & (slots == bands_of(distance + size - 1, pattern))
        slots[~agree] = pattern.num_bands
        near = torch.cat([torch.arange(1 - size, 0), (~agree).nonzero().squeeze(-1)])
        each = torch.arange(size)[:, None] + near
        return _Layout(slots, near, bands_of(each, pattern), each <= pattern.local_window, each < 0)
