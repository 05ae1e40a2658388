"""transformers' continuous batching: new tokens of many requests in one call, their keys in pages.

A call packs the new tokens of all requests into one row: whole prompts, chunks of prompts, and single tokens. Requests
are attended by themselves, those with one new token all together.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching import PagedAttentionCache

from ...attention import Scores, cell_reads, decode_in_place, key_groups, of_all_heads, reads_in_place
from ...routing import sets
from ..call import Call, start_call
from ..dial import limits
from ..discovery import numbered
from ..layer import FocusLayer
from ..routers import Routed, by_sets, choose_groups, no_groups, own_heads, plain_keys, set_dtype, unknown_set
from .packed import PackedPages, Request, attend_requests
from .pages import GroupTable, group_table, pages_of, write


def route_pages(router: FocusLayer, hidden: Tensor, cache: PagedAttentionCache, kwargs: dict[str, Any]) -> Call | None:
    """A packed call; ``None`` where no adapter is in force.

    Args:
        router: of the attention module that is called.
        hidden: ``(1, T, d)``, of the new tokens.
        cache: where their keys go.
        kwargs: of the attention module.

    Raises:
        ValueError: what Focus cannot do in continuous batching, and what to do instead.
    """
    name = router.routing_adapter if router.mode != "dense" else None
    if name is not None:
        _refuse(router, kwargs)
    elif kwargs.get("block_table") is not None:
        return None  # pages that flash attention fills by itself; an adapter that comes later refuses them
    if router.slides or not numbered(router.get_base_layer()):
        return None
    looks_back = kwargs["read_index"][cache.layer_to_allocator[router.layer_idx].index].numel() > 0
    pages = pages_of(cache, router, is_empty=not looks_back)
    if name is None:
        return None
    call, packed = start_call(router, name, hidden, kwargs), _packed(pages, kwargs)
    if packed.longest <= call.pattern.dense_length and call.config.by_cells:
        return None
    call.tensors, call.paged = (name, router.made_by(name)), packed
    if not call.config.by_cells:
        with torch.no_grad():
            choose_groups(call, *router(hidden, name))
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
    elif router.answer_pairs is not None:
        why = "shares pages by their tokens, whoever asked: focus_hf.set_routing(model, answer_pairs=None)"
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


def attend_pages(call: Call, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """Hard attention of a packed call from `route_pages`, whose keys and values are added to the pages.

    Args:
        query, key, value: of the new tokens, ``(1, H or H_kv, T, D or D_v)``.
        mask: of the batch; what it hides is known without it.
        scores: how they are made.

    Returns:
        ``(1, H, T, D_v)``.
    """
    packed, layer = call.paged, call.router.layer_idx
    pages = packed.pages
    if scores.bias is not None or packed.adds_to_scores(mask):
        raise ValueError("Focus in continuous batching does not route layers that add a bias to their scores.")
    count = packed.written.shape[0]
    new_keys, new_values = (x[0, :, :count].transpose(0, 1).to(pages.cache_tensor.dtype) for x in (key, value))
    write(pages, layer, packed.written, new_keys, new_values)
    table = group_table(pages, layer)
    if call.alone:
        pages.left = None  # as a stranger's: nobody has found the groups of these keys
    else:
        _find_groups(call, table, new_keys)
    own, output = query[0].transpose(0, 1), query.new_zeros(query.shape[2], query.shape[1], value.shape[-1])
    requests = packed.requests
    if packed.singles and reads_in_place(query, table.keys, _groups_in_blocks(call, table), scores):
        requests = [request for request in requests if not request.is_single]
        _attend_singles(call, table, own, output, scores)

    def stored(rows: Tensor) -> tuple[Tensor, Tensor]:
        return table.stored(table.slots(rows))

    attend_requests(requests, own, output, stored, partial(_route, call, table), call.pattern, scores)
    return output.transpose(0, 1)[None]


def _find_groups(call: Call, table: GroupTable, new_keys: Tensor) -> None:
    """See that the table has the groups of all keys of a call."""
    packed, config = call.paged, call.config
    count, writers, owner = len(new_keys), packed.pages.writers, (call.tensors, config.top_k)
    if config.by_cells:
        keys = new_keys.transpose(0, 1)[None]
        router = own_heads(call, keys.shape[1])
        turn = None if call.rotary is None else (call.rotary[0][:, :count], call.rotary[1][:, :count])
        new = key_groups(plain_keys(replace(call, rotary=turn), keys, count), router)[0].T
    else:
        assert call.ranking is not None
        numbers = sets.set_numbers(call.ranking[0, :count, : config.top_k], config.num_groups)
        new = numbers.to(set_dtype(config))[:, None]
    table.put(table.slots(packed.written), new, owner, writers)
    slots = table.slots(packed.rows)
    lost = table.lost(slots, writers)
    if not len(lost):
        return
    if config.by_cells:
        which = torch.isin(slots, lost)
        lost, positions = slots[which], packed.positions[which][None]
        keys = table.stored(lost)[0].transpose(0, 1)[None]
        found = key_groups(plain_keys(call, keys, len(lost), positions), router)[0].T
    else:
        found = new.new_full((len(lost), 1), unknown_set(config))
    table.put(lost, found, owner, writers)


def _attend_singles(call: Call, table: GroupTable, query: Tensor, output: Tensor, scores: Scores) -> None:
    """Attention of the requests with one new token, ``(T, H, D)`` into ``(T, H, D_v)``: their keys are read where they
    stand."""
    config, heads = call.config, table.keys.shape[1]
    new, positions, blocks = call.paged.of_singles
    groups, own = _groups_in_blocks(call, table), query[new][:, :, None]
    if call.alone:
        reads = own.new_zeros((len(new), 1, 1, 1, 1), dtype=torch.bool)
    elif config.by_cells:
        reads = cell_reads(own, own_heads(call, heads), limits(config, positions[:, None]))
    else:
        reads = by_sets(table.groups(table.slots(call.paged.written[new])), config, 1, complete=False)[1]
    pattern = replace(call.pattern, num_bands=reads.shape[-1])
    tensors = own, table.keys, table.values, *of_all_heads(groups, reads, heads)
    output[new] = decode_in_place(*tensors, positions, blocks, pattern, scores)[:, :, 0]


def _groups_in_blocks(call: Call, table: GroupTable) -> Tensor:
    if call.alone:
        return table.keys.new_zeros((1, 1, 1), dtype=torch.uint8).expand(len(table.keys), 1, table.keys.shape[2])
    return table.blocks


def _route(call: Call, table: GroupTable, request: Request, query: Tensor, key: Tensor) -> Routed:
    """The routing of a request whose keys are gathered, see `attend_requests`."""
    count, config = query.shape[2], call.config
    if call.alone:
        return no_groups(key, count)
    groups = table.groups(table.slots(request.rows))[None]
    if not config.by_cells:
        return by_sets(groups[..., 0], config, count, complete=False)
    positions = torch.arange(key.shape[2] - count, key.shape[2], device=key.device)[None]
    return groups.transpose(1, 2), cell_reads(query, own_heads(call, key.shape[1]), limits(config, positions)), None
