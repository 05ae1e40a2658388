"""One new token of each sequence against a cache: the keys that it reads are gathered, and attended.

The groups of keys become a mask, the mask an index, the keys and values at the index are gathered: what is read grows
with what is attended, besides a byte for each key and head.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .definition import Pattern, WhoAttends, attended_pairs, bands_of, one_head
from .problem import Problem

#: A larger share of the keys is read sooner where it lies, under a mask, than gathered.
MOST_GATHERED = 0.35


def gathered_focus_attention(problem: Problem) -> Tensor:
    """Hard Focus attention of one query for each sequence.

    Args:
        problem: what to compute, with ``Q = 1`` and plain scores; without sink logits.

    Returns:
        ``(B, H, 1, D_v)``; zeros for a query that sees nothing.
    """
    query, kv_heads = problem.query, problem.key.shape[1]
    read = keys_read(problem.who)
    # The query heads of a key head become its queries, so that keys are gathered once for all of them.
    folded = query.unflatten(1, (kv_heads, -1)).squeeze(3)
    attend = _one_sequence if query.shape[0] == 1 else _batch
    return attend(folded, problem.key, problem.value, read, problem.scores.scale).flatten(1, 2)[:, :, None]


def keys_read(who: WhoAttends) -> Tensor:
    """`attended_pairs` of the newest token: bool ``(B, 1 or H_kv, S)``, one head where all have the same.

    Where nothing is padding, positions say nothing that columns do not: the bands of distance are the same in every
    step, counted from the end.
    """
    pattern, first, length = who.pattern, who.first_position, who.positions.shape[1]
    if first is None or first + length <= pattern.dense_below:
        return one_head(attended_pairs(who)).squeeze(2)
    reads, cells = one_head(who.reads)[:, :, 0].flatten(-2), one_head(who.key_groups)
    if pattern.num_bands > 1:
        bands = _bands_from_the_end(pattern, 1 << length.bit_length(), cells.device)
        cells = torch.add(bands[-length:], cells, alpha=pattern.num_bands)
    else:
        cells = cells.long()
    heads = max(cells.shape[1], reads.shape[1])
    read = reads.expand(-1, heads, -1).gather(-1, cells.expand(-1, heads, -1))
    read[..., max(0, length - 1 - pattern.local_window) :].fill_(True)
    read[..., : max(0, pattern.sink_tokens - first)].fill_(True)
    return read


@functools.lru_cache(maxsize=8)
def _bands_from_the_end(pattern: Pattern, length: int, device: torch.device) -> Tensor:
    """The band of each distance, the largest distance first: int64 ``(length,)``."""
    with torch.inference_mode(False):
        return bands_of(torch.arange(length - 1, -1, -1, device=device), pattern)


def _one_sequence(query: Tensor, key: Tensor, value: Tensor, read: Tensor, scale: float) -> Tensor:
    """Each list of keys as long as it is: ``(1, H_kv, r, D_v)`` from queries ``(1, H_kv, r, D)``."""
    lists, column = read[0].nonzero().unbind(-1)
    if column.shape[0] > MOST_GATHERED * read.numel():
        return F.scaled_dot_product_attention(query, key, value, attn_mask=read[:, :, None], scale=scale)
    if read.shape[1] == 1:
        heads = torch.arange(key.shape[1], device=column.device)[:, None]
        keys, values = (x[None] for x in _gather((key, value), heads, column))
        return F.scaled_dot_product_attention(query, keys, values, scale=scale)
    ends = torch.searchsorted(lists.contiguous(), torch.arange(1, read.shape[1] + 1, device=column.device)).tolist()
    keys, values = (x[None, None] for x in _gather((key, value), lists, column))
    outputs, start = [], 0
    for head, end in enumerate(ends):
        own, some = slice(start, end), query[:, head : head + 1]
        outputs.append(F.scaled_dot_product_attention(some, keys[:, :, own], values[:, :, own], scale=scale))
        start = end
    return torch.cat(outputs, dim=1)


def _batch(query: Tensor, key: Tensor, value: Tensor, read: Tensor, scale: float) -> Tensor:
    """Lists of keys filled up to the longest, in one call: ``(B, H_kv, r, D_v)`` from queries ``(B, H_kv, r, D)``."""
    counts = read.sum(dim=-1, keepdim=True)
    nothing = (counts == 0)[..., None]
    longest = max(1, int(counts.max()))
    if longest > MOST_GATHERED * read.shape[-1]:
        mask = read[:, :, None] | nothing
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale).masked_fill(nothing, 0.0)
    lists, column = read.flatten(0, 1).nonzero().unbind(-1)
    place = torch.arange(lists.shape[0], device=lists.device) - (counts.flatten().cumsum(0) - counts.flatten())[lists]
    index = column.new_zeros(read.shape[0] * read.shape[1], longest).index_put_((lists, place), column)
    real = (torch.arange(longest, device=lists.device) < counts)[:, :, None]
    heads = torch.arange(key.shape[0] * key.shape[1], device=lists.device).view(*key.shape[:2], 1)
    keys, values = _gather((key, value), heads, index.view(*read.shape[:2], longest))
    output = F.scaled_dot_product_attention(query, keys, values, attn_mask=real | nothing, scale=scale)
    return output.masked_fill(nothing, 0.0)


def _gather(states: Sequence[Tensor], head: Tensor, column: Tensor) -> list[Tensor]:
    """Keys and values ``(..., D)`` of some of the ``B * H_kv`` heads, at columns: both broadcast to ``(...)``.

    Nothing is copied besides, whatever lies between heads (unused room in a static cache) or tokens.
    """
    found: list[Tensor] = []
    strides: tuple[int, int] | None = None
    place = column
    for one in states:
        batch, heads, length, width = one.shape
        of_sequence, of_head, of_token, of_number = one.stride()
        in_rows = of_number == 1 and not (of_token % width or of_head % width)
        if not in_rows or (batch > 1 and of_sequence != of_head * heads):
            one, of_head, of_token = one.contiguous(), length * width, width
        rows = one.as_strided(
            (((batch * heads - 1) * of_head + (length - 1) * of_token) // width + 1, width), (width, 1)
        )
        if strides != (strides := (of_head // width, of_token // width)):
            place = torch.add(column if strides[1] == 1 else column * strides[1], head, alpha=strides[0])
        found.append(F.embedding(place, rows))
    return found
