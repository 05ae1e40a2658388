"""Attention of a packed call: each request for itself, under the one definition (`attention.mask`).

Tokens that come one at a time are computed all together, over the keys that they attend to and no others; prompts and
chunks one request after the other, as a call of that request alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..attention import HeadClass, Pattern, Scores, WhoAttends, attended_pairs, gather_index, gathered_attention
from .call import Routing
from .hard import hard_attention
from .packed import Packed


def attend_packed(
    how: Routing,
    packed: Packed,
    new: tuple[Tensor, Tensor, Tensor],
    stored: tuple[Tensor, Tensor],
    scores: Scores,
) -> Tensor:
    """Hard attention of a packed call.

    Args:
        how: the routing: memberships, bool ``(keys, columns)``, are those of the tokens at ``packed.rows``, and reads,
            bool ``(T, columns)``, of the new tokens, or ``None`` where these read the groups that they belong to;
            ``groups_each`` holds for the new tokens.
        packed: whose tokens are which.
        new: queries ``(1, H, T, D)``, keys ``(1, H_kv, T, D)`` and values ``(1, H_kv, T, D_v)`` of the new tokens.
        stored: keys ``(rows, H_kv, D)`` and values ``(rows, H_kv, D_v)`` of the cache, the new tokens' among them.
        scores: how they are made.

    Returns:
        ``(1, H, T, D_v)``.
    """
    query, key, value = new
    known, reads = how.memberships, how.reads
    keys, values = stored
    output = query.new_zeros(query.shape[2], query.shape[1], value.shape[-1])
    for asking, asked in packed.requests():
        starts = asked.stop - asked.start == asking.stop - asking.start
        k, v = (
            (x[0, :, asking] if starts else kept[packed.rows[asked]].to(x.dtype).transpose(0, 1))[None]
            for x, kept in ((key, keys), (value, values))
        )
        its_reads = None if reads is None else reads[None, asking]
        each = how.groups_each if starts else None  # tokens of earlier calls may be in any number of groups
        own = replace(how, memberships=known[None, asked], reads=its_reads, groups_each=each)
        part = hard_attention(own, query[:, :, asking], k, v, None, scores, is_sliding=False)
        output[asking] = part[0].transpose(0, 1)
    if packed.singles is not None:
        which, of_keys, positions = packed.singles
        # A request reads with groups of its own, or with those that its last token belongs to.
        mine = known[of_keys[:, -1]] if reads is None else reads[which]
        every = mine[:, None].expand(-1, of_keys.shape[1], -1)
        who = WhoAttends(how.pattern, positions, known[of_keys], reads=every)
        rows = packed.rows[of_keys]
        output[which] = _attend_singles(query[0, :, which].transpose(0, 1), keys, values, rows, who, how, scores)
    return output.transpose(0, 1)[None]


def _attend_singles(
    query: Tensor, keys: Tensor, values: Tensor, rows: Tensor, who: WhoAttends, how: Routing, scores: Scores
) -> Tensor:
    """One query of each request, ``(R, H, D)``, over the rows ``(R, S)`` of the pages: ``(R, H, D_v)``."""
    kv_heads = keys.shape[1]
    repeat = query.shape[1] // kv_heads
    output = query.new_empty(query.shape[0], query.shape[1], values.shape[-1])
    classes: Sequence[HeadClass] = how.classes or (_everybody(kv_heads, how.pattern, who.memberships.shape[-1]),)
    for some in classes:
        for heads, own in _who_by_heads(who, some):
            pairs = attended_pairs(own, slice(-1, None))[:, 0, 0]
            index, real = gather_index(pairs)
            found = rows.gather(1, index)
            k, v = (
                (x[found, heads[0]][:, None] if len(heads) == 1 else x[found][:, :, heads].transpose(1, 2))
                for x in (keys, values)
            )
            mine = torch.tensor([head * repeat + i for head in heads for i in range(repeat)], device=query.device)
            logits = scores.sink_logits
            own_scores = scores if logits is None else replace(scores, sink_logits=logits[mine])
            q = query.index_select(1, mine).to(k.dtype)
            output[:, mine] = gathered_attention(q, k, v, real, own_scores).to(output.dtype)
    return output


def _everybody(kv_heads: int, pattern: Pattern, columns: int) -> HeadClass:
    """All heads of a layer, which attend alike."""
    return HeadClass(tuple(range(kv_heads)), pattern, (slice(0, columns),))


def _who_by_heads(who: WhoAttends, some: HeadClass) -> Iterator[tuple[list[int], WhoAttends]]:
    """The heads of a class that attend to the same keys, and who attends in them."""
    own = replace(who, pattern=some.pattern)
    if not some.columns:
        yield list(some.kv_heads), own.without_groups()
        return
    heads = [list(some.kv_heads)] if len(some.columns) == 1 else [[head] for head in some.kv_heads]
    for together, columns in zip(heads, some.columns, strict=True):
        assert own.reads is not None
        yield together, replace(own, memberships=own.memberships[..., columns], reads=own.reads[..., columns])
