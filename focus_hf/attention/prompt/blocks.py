"""Prompts on a CPU: a block of consecutive queries attends to the keys that any of them reads, and to no others.

Consecutive queries read much the same, so keys are gathered once for all of them, and what is not each one's own is
hidden by a bias. To all queries of a block most keys are at distances of one band: what they read of such a key is a
row of a table, by the key's group and that band. The others are few and stand at the same distances from every block:
those in the window, and about each distance at which a band begins.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..definition import Pattern, bands_of, sequences
from ..kernels import Call, CpuFlash, Rows, cpu_flash
from ..problem import Problem

#: Rows of a block: its queries, once for each query head of a key head.
ROWS = 96

#: Queries whose keys are looked for together; bounds memory at ``8 * S * TOGETHER / ROWS`` numbers or so.
TOGETHER = 512


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
            key=_some(problem.key[row], tokens),
            value=_some(problem.value[row], tokens),
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
        key, value: ``(H_kv, S, D)``, ``(H_kv, S, D_v)``.
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
        num_queries = self.query.shape[1]
        output = self.query.new_empty(*self.query.shape[:2], self.value.shape[-1])
        earlier = self.key.shape[1] - num_queries
        start = min(max(self.pattern.dense_below - self.first - earlier, 0), num_queries)
        if start:
            call = Call(Rows.single(start, earlier + start, self.query.device), self.scale)
            k, v = (x[:, : earlier + start].transpose(0, 1) for x in (self.key, self.value))
            dense, _ = CpuFlash().forward(self.query[:, :start].transpose(0, 1), k, v, call)
            output[:, :start] = dense.transpose(0, 1)
        size = max(8, ROWS * self.key.shape[0] // self.query.shape[0] // 8 * 8)
        while start < num_queries:
            own = min(size, num_queries - start)
            count = max(1, min(TOGETHER, num_queries - start) // own)
            self._blocks(output, start, count, own)
            start += count * own
        return output

    def _blocks(self, output: Tensor, start: int, count: int, size: int) -> None:
        """``count`` blocks of ``size`` queries each, the first of them query ``start``."""
        pattern, kv_heads = self.pattern, self.key.shape[0]
        first = start + self.key.shape[1] - self.query.shape[1] + size * torch.arange(count)  # where blocks begin
        end = int(first[-1])
        layout = _layout(pattern, size, 1 << end.bit_length())
        sinks = min(max(0, pattern.sink_tokens - self.first), end + size)
        far = max(sinks, end - pattern.local_window)
        slots = layout.slots[(first[:, None] - torch.arange(sinks, far)).clamp_(min=0)]
        near = first[:, None] - layout.distances
        is_there = (near >= sinks)[:, None]
        columns = torch.cat([near.clamp_(min=0), torch.arange(sinks).expand(count, -1)], dim=1)
        i = first[:, None] + torch.arange(size)
        hidden_sinks = torch.arange(sinks) > i[..., None]
        lowest, repeat = torch.finfo(self.query.dtype).min, self.query.shape[0] // kv_heads
        rows = slice(start, start + count * size)
        for head in range(kv_heads):
            groups, heads = self.groups[head], slice(head * repeat, (head + 1) * repeat)
            reads = self.reads[head, rows].unflatten(0, (count, size))
            block, column, cell = _read_by_any(reads, slots, groups[sinks:far])
            column += sinks
            cells = torch.add(layout.bands, groups[near][:, None], alpha=pattern.num_bands)
            hidden = ~(reads.flatten(2).gather(2, cells) | layout.in_window) | ~is_there | layout.later
            bias = self.query.new_zeros(count, size, columns.shape[1])
            bias.masked_fill_(torch.cat([hidden, hidden_sinks], dim=-1), lowest)
            table = self.query.new_zeros(count, *reads.shape[2:], size)
            table = table.masked_fill_(~reads.movedim(1, -1), lowest).flatten(1, 2)
            q, k, v = self.query[heads], self.key[head], self.value[head]
            for one, own in enumerate(block):
                index = torch.cat([columns[one], column[own]])
                mask = torch.cat([bias[one], table[one].index_select(0, cell[own]).t()], dim=1)
                asking = slice(start + one * size, start + (one + 1) * size)
                some = k.index_select(0, index)[:, None], v.index_select(0, index)[:, None]
                found, _ = cpu_flash(q[:, asking].transpose(0, 1), *some, self.scale, bias=mask[None, None])
                output[heads, asking] = found.transpose(0, 1)


def _read_by_any(reads: Tensor, slots: Tensor, groups: Tensor) -> tuple[list[slice], Tensor, Tensor]:
    """The keys that any query of a block reads.

    Args:
        reads: bool ``(blocks, size, K, bands)``.
        slots: ``(blocks, C)``, the band of each key, ``bands`` for one that is not looked for.
        groups: of the keys, ``(C,)``.

    Returns:
        For each block which of the following are its own; keys in ``0 .. C - 1``; and their cells, ``group * bands +
        band``.
    """
    count, num_bands, width = reads.shape[0], reads.shape[3], groups.shape[0]
    any_reads = torch.nn.functional.pad(reads.any(dim=1), (0, 1)).flatten(1)
    place = torch.add(slots, groups, alpha=num_bands + 1)
    found = any_reads.gather(1, place).view(-1).nonzero().squeeze(-1)
    ends = torch.searchsorted(found, width * torch.arange(count + 1)).tolist()
    place = place.view(-1).index_select(0, found)
    cell = place - place.div(num_bands + 1, rounding_mode="floor")
    return [slice(a, b) for a, b in zip(ends, ends[1:], strict=False)], found.remainder_(max(width, 1)), cell


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
