"""Hard Focus attention where queries read other groups than they belong to, on the device: nothing is read back.

The same function as `lookup`, by a plan that is made on the device. Distant keys are sorted by group; what a query may
see of a group that it reads is how many of its first keys: those beyond its window. Windows, sinks and dense starts
are those of heads without groups (`device_path`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .device_path import attend_on_device, finish, flat_tokens
from .device_plan import SortedRows, Tokens, make_device_plan
from .kernels import Kernel
from .mask import WhoAttends
from .problem import Problem
from .steps import step

#: `kernels.triton_lookup.lookup_forward`, or what computes the same.
Lookup = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor], float], tuple]

#: More than any position: rows and positions as one ascending number.
_STRIDE = 2**31


def fits_lookup(who: WhoAttends) -> bool:
    """Whether enough is known: every key is in one group, and every query reads as many."""
    return who.known is not None and who.known.groups_each == 1 and who.known.reads_each is not None


def device_lookup_attention(problem: Problem, kernel: Kernel, lookup: Lookup, block: int) -> Tensor:
    """As `lookup_focus_attention`, for a problem that `fits_lookup`.

    Args:
        problem: what to compute.
        kernel: the backend of windows and sinks, which takes many rows in one call.
        lookup: the kernel of distant pairs.
        block: readers of one list that it handles together.
    """
    num_queries, who = problem.num_queries, problem.who
    with step("plan"):
        near = make_device_plan(who.without_groups(), num_queries)
        far = make_lookup_plan(who, num_queries, block)
    q, k, v = flat_tokens(problem)
    with step("groups"):
        found, log = lookup(q, k, v, far.asking, far.limits, far.keys, far.blocks, problem.scores.scale)
    with step("gather"):
        found, log = (x.index_select(0, far.slots.flatten()).unflatten(0, far.slots.shape) for x in (found, log))
        found = found.masked_fill(far.silent[:, None, None, None], 0.0)  # behind the last list is anything, NaN too
        log = log.masked_fill(far.silent[:, None, None], float("-inf"))
    scale, needs_lse = problem.scores.scale, problem.scores.sink_logits is not None
    output, lse = attend_on_device(q, k, v, near, scale, kernel, needs_lse, more=[(found, log)])
    return finish(problem, output, lse, near.is_real)


@dataclass(frozen=True)
class LookupPlan:
    """Distant pairs: readers (a query with a group that it reads) and lists of keys, both by group.

    Args:
        asking, limits, keys, blocks: see `kernels.triton_lookup.lookup_forward`.
        slots: ``(B * Q, r)``, where among the readers each query's are.
        silent: ``(B * Q,)`` bool, queries that have no distant pairs; their slots mean nothing.
    """

    asking: Tensor
    limits: Tensor
    keys: Tensor
    blocks: tuple[Tensor, Tensor, Tensor]
    slots: Tensor
    silent: Tensor


def make_lookup_plan(who: WhoAttends, num_queries: int, block: int) -> LookupPlan:
    """Plan the distant pairs of a call; readers of one list are handled in blocks of so many."""
    known, pattern, reads = who.known, who.pattern, who.reads
    assert known is not None and known.reads_each is not None and reads is not None
    tokens, num_groups, device = Tokens(who, known, num_queries), reads.shape[-1], reads.device
    num_rows, reads_each = tokens.num_segments * num_groups, known.reads_each

    row = tokens.segment * num_groups + who.memberships.byte().argmax(dim=-1)
    row = row.masked_fill(who.positions < pattern.sink_tokens, num_rows).flatten()
    numbers = torch.arange(num_rows + 1, device=device)
    lists = SortedRows.by_row(row, numbers)

    place, segment = tokens.asking(who.positions), tokens.asking(tokens.segment)
    silent = place < max(pattern.dense_below, pattern.local_window + 1 + pattern.sink_tokens)
    own = tokens.asking(reads).byte().sort(dim=-1, descending=True, stable=True).indices[..., :reads_each]
    reader_row = (segment[..., None] * num_groups + own).masked_fill(silent[..., None], num_rows).flatten()
    readers = SortedRows.by_row(reader_row, numbers)
    asking, reader_row = readers.order // reads_each, reader_row.index_select(0, readers.order)

    at_key = (row * _STRIDE + who.positions.flatten()).index_select(0, lists.order)
    beyond = place.flatten().index_select(0, asking) - pattern.local_window
    limits = torch.searchsorted(at_key, reader_row * _STRIDE + beyond) - lists.offsets.index_select(0, reader_row)

    counts = readers.offsets.diff()
    num_blocks = (counts + block - 1) // block
    ends = num_blocks.cumsum(dim=0)
    ids = torch.arange(-(-asking.shape[0] // block) + num_rows, device=device)
    of_row = torch.searchsorted(ends, ids, right=True).clamp(max=num_rows - 1)
    earlier = (ids - (ends - num_blocks).index_select(0, of_row)) * block
    first = readers.offsets.index_select(0, of_row) + earlier
    blocks = first, readers.offsets.index_select(0, of_row + 1).long(), lists.offsets.index_select(0, of_row).long()
    slots = readers.places().view(-1, reads_each)
    return LookupPlan(asking, limits, lists.order, blocks, slots, silent.flatten())
