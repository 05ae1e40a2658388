"""transformers' continuous batching: new tokens of many requests in one call, their keys in pages.

A call packs the new tokens of all requests into one row: whole prompts, chunks of prompts, and single tokens. Requests
are attended by themselves, those with one new token all together.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...attention import Problem, Scores, WhoAttends, focus_attention
from ..call import Call
from ..decide import pattern_in_mode
from ..discovery import numbered
from ..layer import FocusLayer
from ..routers import no_groups, rank_groups, route
from .packed import PackedPages
from .pages import find_pages, pages_of
from .table import GroupTable


@dataclass
class PagedCall:
    """What a call of continuous batching needs beside its routing.

    Args:
        pages: the layer's allocator.
        layer: its index.
        packed: whose tokens are which.
        table: groups of the keys in the pages.
    """

    pages: Any
    layer: int
    packed: PackedPages
    table: GroupTable


def route_pages(router: FocusLayer, hidden_states: Tensor, kwargs: dict[str, Any]) -> Call | None:
    """A packed call; ``None`` where no adapter is in force.

    Args:
        router: of the attention module that is called.
        hidden_states: ``(1, T, d)``, of the new tokens.
        kwargs: of the attention module.

    Raises:
        ValueError: what Focus cannot do in continuous batching, and what to do instead.
    """
    cache, name = find_pages(kwargs), router.routing_adapter
    assert cache is not None
    active = name is not None and router.mode != "dense"
    if active:
        _refuse(router, kwargs)
    elif kwargs.get("block_table") is not None:
        return None  # pages that flash attention fills by itself; an adapter that comes later refuses them
    if router.slides or not numbered(router.get_base_layer()):
        return None
    pages = pages_of(cache, router)
    if name is None or not active:
        return None
    packed, config = _packed(pages, kwargs), router.configs[name]
    pattern, alone = pattern_in_mode(config, router.mode, router.window)
    if packed.longest <= pattern.dense_length and config.by_cells:
        return None
    table = _tables(cache).setdefault(router.layer_idx, GroupTable(_rows(pages, router.layer_idx)))
    rotary, places = kwargs.get("position_embeddings"), kwargs.get("position_ids")
    call = Call(
        *(router, name, pattern, hidden_states, 0),
        alone=alone,
        rotary=tuple(rotary) if isinstance(rotary, tuple | list) and len(rotary) == 2 else None,
        position_ids=places if isinstance(places, Tensor) else None,
        owner=router.owner_of_groups(name),
        paged=PagedCall(pages, router.layer_idx, packed, table),
    )
    if not config.by_cells:
        with torch.no_grad():
            call.ranking = rank_groups(*router(hidden_states, name))
    return call


def _refuse(router: FocusLayer, kwargs: dict[str, Any]) -> None:
    why = None
    if router.slides:
        why = "does not route sliding layers; make the adapter without include_sliding_layers"
    elif not numbered(router.get_base_layer()):
        why = f"does not route {router.name}, whose slot of the cache changes from call to call; use generate()"
    elif kwargs.get("block_table") is not None:
        why = "needs ContinuousBatchingConfig(max_blocks_per_request=0)"
    elif torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        why = "needs ContinuousBatchingConfig(use_cuda_graph=False), and no compilation"
    elif router.mode == "soft":
        why = 'cannot be soft: focus_hf.set_routing(model, mode="hard")'
    elif router.is_observed:
        why = "cannot be looked at: observe generate() instead"
    if why is not None:
        raise ValueError(f"Focus in continuous batching {why}.")


def _packed(pages: Any, kwargs: dict[str, Any]) -> PackedPages:
    """Made once in a forward pass: all layers are handed the same tensors."""
    edges = kwargs["cu_seq_lens_q"]
    made = getattr(pages, "packed", None)
    if made is None or made[0]() is not edges:
        made = pages.packed = (weakref.ref(edges), PackedPages(pages, kwargs))
    return made[1]


def _tables(cache: Any) -> dict[int, GroupTable]:
    """Of a paged cache, by layer."""
    if not hasattr(cache, "focus_tables"):
        cache.focus_tables = {}
    return cache.focus_tables


def _rows(pages: Any, layer: int) -> int:
    return pages._kv_token_views[layer][0].shape[0]


def attend_pages(
    call: Call, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores
) -> Tensor:
    """Hard attention of a packed call, whose keys and values are added to the pages.

    Args:
        call: from `route_pages`.
        query: ``(1, H, T, D)``.
        key: ``(1, H_kv, T, D)``, of the new tokens.
        value: ``(1, H_kv, T, D_v)``.
        mask: of the batch; what it hides is known without it.
        scores: how they are made.

    Returns:
        ``(1, H, T, D_v)``.
    """
    paged = call.paged
    assert paged is not None
    packed, pages = paged.packed, paged.pages
    if scores.bias is not None or packed.adds_to_scores(mask):
        raise ValueError("Focus in continuous batching does not route layers that add a bias to their scores.")
    count = packed.written.shape[0]
    new_keys, new_values = (x[0, :, :count].transpose(0, 1).to(pages.cache_tensor.dtype) for x in (key, value))
    pages.update(new_keys, new_values, paged.layer, packed.written[:0], packed.written)
    keys, values = pages._kv_token_views[paged.layer]
    if call.ranking is not None:
        paged.table.put(packed.written, keys[packed.written], call.ranking[0, :count], call.owner)
    output = query.new_zeros(query.shape[2], query.shape[1], value.shape[-1])
    for new, rows, positions in packed.requests():
        output[new] = _attend_requests(call, query[0], (keys, values), new, rows, positions, scores).transpose(1, 2)
    return output.transpose(0, 1)[None]


def _attend_requests(
    call: Call,
    query: Tensor,
    stored: tuple[Tensor, Tensor],
    new: Tensor,
    rows: Tensor,
    positions: Tensor,
    scores: Scores,
) -> Tensor:
    """Requests with ``Q`` new tokens each: ``(R, H, Q, D_v)``.

    Args:
        call: that is made.
        query: ``(H, T, D)``.
        stored: keys ``(rows, H_kv, D)`` and values of the pages.
        new, rows, positions: see `Packed.requests`.
        scores: how they are made.
    """
    key, value = (x[rows].transpose(1, 2).to(query.dtype) for x in stored)
    own, asked = query[:, new].transpose(0, 1), positions[:, -new.shape[1] :]
    part = replace(call, seen=rows.shape[1] - new.shape[1], memory=None, groups=None)
    if call.alone:
        routed = no_groups(key, new.shape[1])
    elif call.ranking is not None:
        part.ranking = _rankings(call, stored[0], rows, positions)
        routed = route(replace(part, seen=0), own, key, asked)
        routed = (routed[0], routed[1][:, :, -new.shape[1] :], routed[2])
    else:
        rotary = call.router.rotary
        if call.rotary is not None and rotary is not None:
            angles = rotary(call.rotary[0][:, :1], positions.clamp(min=0))
            part.rotary = tuple(angles)
        routed = route(part, own, key, asked)
    groups, reads = (x.expand(-1, key.shape[1], *x.shape[2:]) for x in routed[:2])
    pattern = replace(call.pattern, num_bands=reads.shape[-1])
    unpadded = 0 if rows.shape[0] == 1 else None
    who = WhoAttends(pattern, positions, groups, reads, first_position=unpadded, memberships=routed[2])
    return focus_attention(Problem(own, key, value, who, scores), path=call.router.path, kernel=call.router.kernel)


def _rankings(call: Call, keys: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """Of the tokens in rows ``(R, S)``: int16 ``(R, S, K)``, -1 where nobody knows."""
    assert call.paged is not None and call.ranking is not None
    found = call.paged.table.get(rows.flatten(), keys[rows.flatten()], call.owner)
    if found is None:
        return call.ranking.new_full((*rows.shape, call.ranking.shape[-1]), -1)
    return found.view(*rows.shape, -1)
