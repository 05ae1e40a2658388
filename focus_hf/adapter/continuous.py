"""transformers' continuous batching: new tokens of many requests in one call, their keys in pages.

A call packs the new tokens of all requests into one row: whole prompts, chunks of prompts, and single tokens; each
request is attended for itself (`attend_packed`).
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..attention import Scores
from .attend_packed import attend_packed
from .call import Routing, groups_each
from .decide import window_of
from .discovery import numbered
from .heads import head_classes, shared_columns, top_ks_by_head
from .layer import FocusLayer
from .packed import PackedPages, PagedCall
from .pages import find_pages, pages_of


@torch.no_grad()
def route_pages(router: FocusLayer, hidden_states: Tensor, kwargs: dict[str, Any]) -> Routing | None:
    """The routing of a packed call; ``None`` where it is dense, or no adapter is in force.

    Args:
        router: of the attention module that is called.
        hidden_states: ``(1, T, d)``, of the new tokens.
        kwargs: of the attention module; its pages now remember the tokens' groups.

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
    read_index = kwargs["read_index"][cache.layer_to_allocator[router.layer_idx].index]
    pages = pages_of(cache, router, is_empty=read_index.numel() == 0)
    packed = _packed(pages, kwargs)
    if name is None or not active:
        pages.forget(router.layer_idx, packed.write_places)
        return None
    config = router.configs[name]
    window = window_of(config, router.mode, router.window)
    classes = None if config.plain or window is not None else head_classes(config, router.layer_idx)
    memberships, reads = _columns(router, name, hidden_states)
    if window is not None:
        memberships, reads = torch.zeros_like(memberships), None
    owner = (name, memberships.shape[-1])
    pages.remember(router.layer_idx, packed.write_places, memberships[0, : packed.written.shape[0]], owner)
    pattern = config.pattern if window is None else window
    patterns = [pattern] if classes is None else [some.pattern for some in classes]
    if packed.longest <= min(p.dense_length for p in patterns):
        return None
    return Routing(
        *(pattern, memberships, config.top_k, router.path, router.kernel),
        owner=owner,
        classes=classes,
        groups_each=0 if window is not None else groups_each(config.top_k, classes, reads),
        paged=PagedCall(pages, router.layer_idx, packed, None if reads is None else reads[0]),
    )


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
    elif router.stand_in or router.observer or router.pairs_observer or router.attention_observer:
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


def _columns(router: FocusLayer, adapter_name: str, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
    """Memberships of the new tokens, and the groups that they read: bool ``(1, T, columns)``."""
    config = router.configs[adapter_name]
    if config.routing == "per_head":
        by_head = router.head_scores(hidden_states, adapter_name)
        if by_head is None:
            nothing = torch.zeros(*hidden_states.shape[:2], 0, dtype=torch.bool, device=hidden_states.device)
            return nothing, nothing
        top_ks = top_ks_by_head(config, router.layer_idx)
        return by_head.memberships().flatten(-2), by_head.reads(top_ks).flatten(-2)
    scores, balance = router(hidden_states, adapter_name)
    return shared_columns(config, router.layer_idx, scores, balance), None


def attend_pages(how: Routing, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """Hard attention of a packed call, whose keys and values are added to the pages.

    Args:
        how: from `route_pages`.
        query: ``(1, H, T, D)``.
        key: ``(1, H_kv, T, D)``, of the new tokens.
        value: ``(1, H_kv, T, D_v)``.
        scores: how they are made.

    Returns:
        ``(1, H, T, D_v)``.
    """
    call = how.paged
    assert call is not None
    packed, pages = call.packed, call.pages
    count = packed.written.shape[0]
    new_keys, new_values = (x[0, :, :count].transpose(0, 1).to(pages.cache_tensor.dtype) for x in (key, value))
    pages.update(new_keys, new_values, call.layer, packed.written[:0], packed.written)
    known = pages.recall(call.layer, packed.read_places)
    own = replace(how, memberships=known, reads=call.reads, paged=None)
    return attend_packed(own, packed, (query, key, value), pages._kv_token_views[call.layer], scores)
