"""transformers' continuous batching: new tokens of many requests in one call, their keys in pages.

A call packs the new tokens of all requests into one row: whole prompts, chunks of prompts, and single tokens. Requests
are attended by themselves, those with one new token all together.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching import PagedAttentionCache

from ...attention import Scores, cell_reads, key_groups
from ..call import Call, start_call
from ..dial import limits
from ..discovery import numbered
from ..layer import FocusLayer
from ..routers import Routed, by_ranking, no_groups, own_heads, plain_keys, rank_groups
from .packed import PackedPages, attend_requests
from .pages import group_table, pages_of


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
            call.ranking = rank_groups(*router(hidden, name))
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
    pages.update(new_keys, new_values, layer, packed.written[:0], packed.written)
    keys, values = pages._kv_token_views[layer]
    if call.ranking is not None:
        group_table(pages, layer).put(packed.written, keys[packed.written], call.ranking[0, :count], call.tensors)
    route = partial(_route, call, keys)
    return attend_requests(packed, query, lambda rows: (keys[rows], values[rows]), route, call.pattern, scores)


def _route(call: Call, stored: Tensor, requests: tuple[Tensor, Tensor, Tensor], query: Tensor, key: Tensor) -> Routed:
    """The routing of requests, see `attend_requests`; ``stored``: keys of all pages."""
    (_, rows, positions), count, config = requests, query.shape[2], call.config
    if call.alone:
        return no_groups(key, count)
    table = group_table(call.paged.pages, call.router.layer_idx)
    known = table.get(rows.flatten(), stored[rows.flatten()], call.tensors)
    known = None if known is None else known.view(*rows.shape, -1)
    if call.ranking is not None:
        nobody = call.ranking.new_full((*rows.shape, call.ranking.shape[-1]), -1)
        return by_ranking(nobody if known is None else known, config, count, complete=False)
    router, asked = own_heads(call, key.shape[1]), positions[:, -count:]
    if known is None or bool((known < 0).any()):
        groups = key_groups(plain_keys(call, key, key.shape[2], positions), router)
        real = (positions >= 0).flatten()
        of_keys = groups.transpose(1, 2).flatten(0, 1).to(torch.int16)[real]
        table.put(rows.flatten()[real], stored[rows.flatten()[real]], of_keys, call.tensors)
    else:
        groups = known.transpose(1, 2).to(torch.uint8)
    return groups, cell_reads(query, router, limits(config, asked)), None
