"""Routers: from what a layer has (hidden states, queries, keys) to the group of each key and what each query reads."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..attention import cell_reads, key_groups
from ..ranks import split_over
from ..routing import hard_memberships, sets
from ..routing.cells import CellRouter
from ..settings import FocusSettings
from .call import Call
from .dial import limits, limits_from
from .growing import GrowingLayer
from .masks import Asked
from .remembered import Waiting, same_keys
from .rotation import angles, turned_back

#: Groups of keys, integers ``(B, 1 or H_kv, S)``; what queries read, bool ``(B, 1 or H_c, Q, K, bands)``; and, where
#: a routing is shared, in which groups tokens are, bool ``(B, S, K)``.
Routed = tuple[Tensor, Tensor, Tensor | None]

#: Tokens, or one more, whose groups wait to be found together: nothing is as long as a wide window.
MOST_WAITING = 64


def route(call: Call, asked: Asked) -> Routed:
    """The routing of a call; its ``groups`` then are what there is to remember."""
    if call.alone:
        return no_groups(asked.key, asked.query.shape[2])
    return by_cells(call, asked) if call.config.by_cells else shared(call, asked.key)


def no_groups(key: Tensor, num_queries: int) -> Routed:
    """Nobody reads a group."""
    batch, _, length, _ = key.shape
    groups = torch.zeros(batch, 1, length, dtype=torch.uint8, device=key.device)
    nothing = torch.zeros(batch, 1, num_queries, 1, 1, dtype=torch.bool, device=key.device)
    return groups, nothing, torch.zeros(batch, length, 0, dtype=torch.bool, device=key.device)


# -- one routing for all heads, made of hidden states (the paper's)


def choose_groups(call: Call, scores: Tensor, balance: Tensor) -> None:
    """Rank the groups of the new tokens by what `FocusLayer.forward` says, and tell who observes it."""
    scores, router = scores.detach(), call.router
    call.ranking = (scores + balance).sort(dim=-1, descending=True, stable=True).indices.to(torch.int16)
    if router.observer is not None:
        router.observer(router, scores, hard_memberships(scores, balance, call.config.top_k))


def shared(call: Call, key: Tensor) -> Routed:
    """Each token is in its ``top_k`` best groups, and reads the keys that it has one in common with."""
    ranking, config = rank_all(call, key)[:, -key.shape[2] :], call.config  # a sliding layer has dropped the oldest
    numbers = sets.set_numbers(ranking[..., : config.top_k].clamp(min=0), config.num_groups)
    if not call.complete:
        numbers = torch.where(ranking[..., 0] < 0, unknown_set(config), numbers)
    return by_sets(numbers, config, call.hidden.shape[1], complete=call.complete)


def rank_all(call: Call, key: Tensor) -> Tensor:
    """Groups of all tokens, the best first, int16 ``(B, seen + T, K)``: what there is to remember of a call whose keys
    are these, ``(B, H_kv, S, D)``."""
    assert call.ranking is not None
    call.groups = torch.cat([_earlier_ranking(call, call.ranking, key), call.ranking], dim=1)
    call.complete = not call.seen or (call.untouched and call.memory is not None and call.memory.complete)
    return call.groups


def by_sets(numbers: Tensor, config: FocusSettings, num_queries: int, *, complete: bool) -> Routed:
    """The routing of tokens whose sets of groups are known.

    Args:
        numbers: of all tokens' sets, ``(B, S)``; `unknown_set` where nobody knows: cached while the adapter was off,
            or by another one. Such tokens are attended by all, as in the base model.
        config: of the adapter.
        num_queries: the last so many are queries.
        complete: it is known that none is unknown.
    """
    which, device = numbers.int(), numbers.device
    members, meeting = (what(config.num_groups, config.top_k, device) for what in (sets.members, sets.meeting))
    if not complete:
        members, meeting = (F.pad(of, (0, more, 0, 1), value=True) for of, more in ((members, 0), (meeting, 1)))
    reads = meeting[which[:, numbers.shape[1] - num_queries :]]
    of_tokens = members[which] if num_queries > 1 else None  # else nobody asks for them
    return numbers.to(set_dtype(config))[:, None], reads[:, None, ..., None], of_tokens


def unknown_set(config: FocusSettings) -> int:
    """A number that no set of groups has."""
    return sets.count(config.num_groups, config.top_k)


def set_dtype(config: FocusSettings) -> torch.dtype:
    """That the number of a set of groups fits in, and of the unknown one."""
    return torch.uint8 if unknown_set(config) < 256 else torch.int16


def _earlier_ranking(call: Call, new_ranking: Tensor, key: Tensor) -> Tensor:
    """Of the tokens before the new ones: int16 ``(B, seen, K)``; -1 where nobody knows."""
    batch, new, width = new_ranking.shape
    memory = call.memory
    if memory is not None and memory.groups is not None and memory.groups.shape[0] == batch and call.untouched:
        return memory.groups
    ranking = new_ranking.new_full((batch, call.seen, width), -1)
    if memory is None or memory.groups is None or memory.keys is None or key.shape[2] != call.seen + new:
        return ranking
    place = same_keys(memory.keys[:, :, : memory.groups.shape[1]], key[:, :, : call.seen])
    known = memory.groups.to(key.device).flatten(0, 1)[place.clamp(min=0)]
    return torch.where(place[..., None] < 0, ranking, known)


# -- cells: each head by itself, made of its keys and queries


def by_cells(call: Call, asked: Asked) -> Routed:
    """A key is in the group of its content; a query reads groups at distances (`focus_hf.routing.cells`)."""
    query, key, router = asked.query, asked.key, own_heads(call, asked.key.shape[1])
    new = query.shape[2]
    groups = groups_of_keys(call, key, new, router)
    share = call.router.answer_pairs
    if asked.first_position is not None and not torch.compiler.is_compiling():
        limit = limits_from(call.config, asked.first_position + key.shape[2] - new, new, key.device, share)
    else:
        limit = limits(call.config, asked.query_positions(), share)
    return groups, cell_reads(query, router, limit), None


def groups_of_keys(call: Call, key: Tensor, new: int, router: CellRouter) -> Tensor:
    """The group of each key of a call whose last tokens are new, uint8 ``(B, H_kv, S)``.

    No query needs the group of a key that is in its window. So where a plain cache grows token by token, the groups of
    new keys are found together when the first of them is left behind, and are 0 until then.
    """
    memory, length = call.memory if call.untouched else None, key.shape[2]
    known, waiting = (None, ()) if memory is None else (memory.groups, memory.waiting)
    if known is None or known.shape[:2] != key.shape[:2] or call.seen + new != length:
        known, waiting, new = key.new_empty(*key.shape[:2], 0, dtype=torch.uint8), (), length
    one_by_one = new == 1 and isinstance(call.cache_layer, GrowingLayer) and not call.router.is_observed
    most = min(call.pattern.local_window, MOST_WAITING)
    if one_by_one and len(waiting) <= most and known.shape[2] >= length:
        call.groups, call.waiting = known, (*waiting, call.rotary)
        return known[:, :, :length]
    missing = len(waiting) + new
    found = key_groups(plain_keys(call, key, missing, earlier=waiting), router)
    room = found.new_zeros(*found.shape[:2], most + 1 if one_by_one else 0)
    call.groups = torch.cat([known[:, :, : length - missing], found, room], dim=2)
    return call.groups[:, :, :length]


def own_heads(call: Call, kv_heads: int) -> CellRouter:
    """The tensors of the key/value heads that this process has.

    Raises:
        ValueError: it is not known which these are.
    """
    total = int(call.router.configs[call.adapter].key_value_heads or 0)
    if kv_heads == total:
        return call.router.cell_router(call.adapter)
    parts = split_over(call.router.get_base_layer())
    if parts is None or kv_heads * parts.size() != total:
        raise ValueError(
            f"This process has {kv_heads} of a layer's {total} key/value heads, and it is not known which. Split the "
            'model with transformers\' DistributedConfig(tp_plan="auto") over a number of processes that divides '
            f"{total}."
        )
    return call.router.cell_router(call.adapter, (parts.get_local_rank() * kv_heads, kv_heads))


def plain_keys(
    call: Call, key: Tensor, count: int, positions: Tensor | None = None, *, earlier: Waiting = ()
) -> Tensor:
    """The last so many of a call's keys, as they were before positions were applied: ``(B, H_kv, count, D)``.

    Args:
        call: that is made.
        key: ``(B, H_kv, S, D)``.
        count: how many.
        positions: of all keys, ``(B, S)``; by default they stand next to each other, the new tokens last.
        earlier: angles of the tokens before the new ones, if they are known.
    """
    own, turn, attention = key[:, :, key.shape[2] - count :], call.rotary, call.router.get_base_layer()
    if turn is None:
        return own
    if earlier:
        cos, sin = zip(*(one for one in (*earlier, turn) if one is not None), strict=True)
        turn = torch.cat(cos, dim=1), torch.cat(sin, dim=1)
    new, given = turn[0].shape[1], call.position_ids
    if positions is not None or count > new:
        if positions is None:
            first = call.seen if given is None or given.dim() != 2 else given[:, :1]
            positions = torch.arange(key.shape[2], device=key.device)[None] + (first - (key.shape[2] - new))
        turn = angles(call.router.rotary, attention, positions.clamp(min=0), turn)
        if turn is None:
            raise ValueError(
                f"{call.router.name}: the cache was changed, and it is not known how this model makes the angles of "
                "its positions. Start from an empty cache."
            )
    if count < turn[0].shape[1]:
        turn = turn[0][:, -count:], turn[1][:, -count:]
    return turned_back(attention, own, *turn)
