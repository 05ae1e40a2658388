"""Hard Focus attention where queries read other groups than they belong to: keys by group, looked up.

A key is in one group, and a query reads a few, so each attended pair is met once and nothing has to be excluded:

* window and sinks, as without groups (`plan`);
* ``groups``: distant pairs. The keys of a group stand in order, so what a query may see of a group is how many of its
  first keys: those beyond the window. Queries are taken in blocks with the keys that the last of them may see, under a
  bias that hides from the others what only later ones may see (`reader_blocks`);
* ``shared``: keys in several groups (tokens cached while no groups were known), under a mask.

The parts are merged by their logsumexps. Inference on CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .grouped import attend_parts
from .kernels import Kernel, cpu_flash
from .mask import WhoAttends, dense_pairs, distant_pairs, share_a_group
from .merge import Accumulator
from .plan import make_plan, sequences
from .problem import Problem
from .reader_blocks import ROWS, Readers, add_readers, attend_blocks, make_blocks
from .steps import step

#: Queries handled together: so many where keys are in several groups, and at least so many otherwise.
BLOCK = 256

#: Numbers that the results of readers may hold before they are merged.
READERS_SIZE = 2**23


def lookup_focus_attention(problem: Problem, kernel: Kernel) -> Tensor:
    """Hard Focus attention on kernels, for one group per key and any number of groups read.

    Args:
        problem: what to compute, without soft-capping, dropout and extra mask, with ``D_v <= D``.
        kernel: the backend of windows and sinks.

    Returns:
        As `grouped_focus_attention`; it has no gradient.
    """
    rows = [_sequence(problem.sequence(row), kernel) for row in range(problem.query.shape[0])]
    return torch.stack(rows).transpose(1, 2)


def _sequence(problem: Problem, kernel: Kernel) -> Tensor:
    """``(Q, H, D_v)`` for a batch of one."""
    who, scale = problem.who, problem.scores.scale
    q, k, v = (x[0].transpose(0, 1) for x in (problem.query, problem.key, problem.value))
    with step("window"):
        whole = attend_parts(q, k, v, make_plan(who.without_groups(), problem.num_queries), scale, kernel)
    first = problem.num_keys - problem.num_queries
    for _, tokens, queries in sequences(who, problem.num_queries):
        asking = slice(first, None) if isinstance(queries, slice) else queries + first
        _add_groups(whole, q, k, v, who, tokens, asking, first, scale)
    if problem.scores.sink_logits is not None:
        whole.add_logits(problem.scores.sink_logits)
    return whole.output.to(q.dtype)


def _add_groups(
    whole: Accumulator,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    who: WhoAttends,
    tokens: Tensor | slice,
    asking: Tensor | slice,
    first: int,
    scale: float,
) -> None:
    """The distant pairs of one document.

    Args:
        whole: what there is so far, of all queries; added to.
        q, k, v: ``(Q, H, D)``, ``(S, H_kv, D)``, ``(S, H_kv, D_v)``.
        who: of the sequence.
        tokens, asking: the document's tokens, and those of them that are queries, among the ``S``.
        first: the first query among the ``S``.
        scale: factor on ``q . k``.
    """
    assert who.reads is not None
    pattern, every = who.pattern, torch.arange(k.shape[0], device=k.device)
    tokens, asking = every[tokens], every[asking]
    place = who.positions[0]
    asking = asking[place[asking] >= max(pattern.dense_below, pattern.local_window + 1 + pattern.sink_tokens)]
    tokens = tokens[place[tokens] >= pattern.sink_tokens]
    if asking.numel() == 0 or tokens.numel() == 0:
        return
    groups_of = who.memberships[0, tokens]
    counts = groups_of.sum(dim=-1)
    with step("groups"):
        single = tokens[counts == 1]
        group, order = groups_of[counts == 1].int().argmax(dim=-1).sort(stable=True)
        _add_single(whole, q, k, v, who, single[order], group, asking, first, scale)
        if bool((counts > 1).any()):
            _add_shared(whole, q, k, v, who, tokens[counts > 1], asking, first, scale)


def _add_single(
    whole: Accumulator,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    who: WhoAttends,
    keys: Tensor,
    group: Tensor,
    asking: Tensor,
    first: int,
    scale: float,
) -> None:
    """Keys of one group each, sorted by ``group`` and, within one, by position."""
    assert who.reads is not None
    place, num_groups = who.positions[0], who.reads.shape[-1]
    # One ascending list for all groups: a group's keys, then the next group's.
    stride = int(place.max()) + 2
    at_key, edges = group * stride + place[keys], torch.searchsorted(group, torch.arange(num_groups + 1))
    repeat = q.shape[1] // k.shape[1]
    most_read = max(1, int(who.reads[0, asking].sum(dim=-1).max()))
    for some in asking.split(max(BLOCK, READERS_SIZE // (most_read * q.shape[1] * v.shape[-1]))):
        query, own = who.reads[0, some].nonzero(as_tuple=True)
        beyond = place[some][query] - who.pattern.local_window
        limits = torch.searchsorted(at_key, own * stride + beyond) - edges[own]
        seeing = limits > 0
        if not bool(seeing.any()):
            continue
        readers = Readers(query[seeing], own[seeing], limits[seeing])
        blocks = make_blocks(readers, edges, max(16, ROWS // repeat))
        index = some - first
        results = attend_blocks(q.index_select(0, index), k, v, keys, readers, blocks, scale)
        add_readers(whole, index, *results, readers, blocks.slots)


def _add_shared(
    whole: Accumulator,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    who: WhoAttends,
    keys: Tensor,
    asking: Tensor,
    first: int,
    scale: float,
) -> None:
    """Keys in several groups."""
    assert who.reads is not None
    for some in asking.split(BLOCK):
        lowest, highest = int(some[0]), int(some[-1]) + 1
        rows = slice(lowest, highest)
        pairs = (dense_pairs(who, rows)[0, 0] & distant_pairs(who, rows)[0])[some - lowest][:, keys]
        pairs &= share_a_group(who.reads[0, some], who.memberships[0, keys])
        asks = pairs.any(dim=-1)
        if not bool(asks.any()):
            continue
        bias = torch.zeros(pairs[asks].shape, dtype=q.dtype, device=q.device)
        bias.masked_fill_(~pairs[asks], torch.finfo(q.dtype).min)
        index = (some - first)[asks]
        result = cpu_flash(q.index_select(0, index), k[keys], v[keys], scale, bias=bias[None, None])
        whole.add(index, *result)
