"""The truth: a base model whose attention is the definition, spelled out in float64 over an ordinary cache.

What a layer must remember of earlier tokens beside keys and values (`Kept.groups`) lies in a second ordinary cache. So
whatever is done to a cache is done to both, by the library's own code, and nothing here follows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import sdpa_mask

from focus_hf import routing
from focus_hf.adapter import FocusLayer, focus_layers
from focus_hf.attention.definition import PADDING, Pattern, WhoAttends, attended_pairs
from focus_hf.routing import cells

#: Name of the attention function.
NAME = "definition"

#: Groups at most: sets of them are numbers of 8 bits.
MOST_GROUPS = 8

#: A set of groups that is not known is all of them: every query reads it.
UNKNOWN = 2**MOST_GROUPS - 1


@dataclass
class Kept:
    """What the truth keeps between two calls.

    Args:
        cache: keys and values.
        groups: with shared routing, as its "keys", tokens' scores ``(B, 1, S, MOST_GROUPS)``, and as its "values"
            whose they are; with cells the keys before rotary positions.
    """

    cache: Any
    groups: Any

    @classmethod
    def empty(cls, model: Any) -> Kept:
        return cls(DynamicCache(config=model.config), DynamicCache())

    def both(self, change: Callable[[Any], Any]) -> None:
        for cache in (self.cache, self.groups):
            change(cache)


@dataclass
class Call:
    """A layer's call, while it runs.

    Args:
        router: of the model that is judged: its tensors and settings are read, nothing of it is called.
        adapter: the adapter in force, ``None`` for the base model.
        hidden: what enters the attention module.
        rotary: cosines and sines of the new tokens, ``None`` without rotary positions.
        kept: by earlier calls.
        valid: bool ``(B, S)``, tokens that are no padding.
        margins: filled in, by how much decisions were clear.
    """

    router: FocusLayer
    adapter: str | None
    hidden: Tensor
    rotary: tuple[Tensor, Tensor] | None
    kept: Kept
    valid: Tensor
    margins: list[float]


class Reference:
    """The truth for one model with Focus adapters.

    Args:
        base: a copy of the base model, which becomes the reference's own.
        judged: the model with its adapters.

    Attributes:
        margin: the closest decision that was met: a score that was nearer to another group, or to a threshold, than
            rounding goes could have been decided either way.
    """

    def __init__(self, base: Any, judged: nn.Module) -> None:
        self.model = base
        self.routers = {layer.name: layer for layer in focus_layers(judged)}
        self.margin = float("inf")
        base.set_attn_implementation(NAME)

    def __call__(
        self, ids: Tensor, kept: Kept, adapter: str | None, mask: Tensor | None, positions: Tensor | None
    ) -> Tensor:
        """Logits ``(B, T, vocabulary)`` of new tokens; ``kept`` is theirs, too, afterwards."""
        seen = ids.shape[1] + int(kept.cache.get_seq_length())
        valid = torch.ones(ids.shape[0], seen, dtype=torch.bool) if mask is None else mask.bool()
        margins: list[float] = []
        modules = dict(self.model.named_modules())
        handles = []
        for name, router in self.routers.items():

            def note(module: Any, args: Any, kwargs: Any, router: FocusLayer = router) -> None:
                hidden = kwargs.get("hidden_states", args[0] if args else None)
                rotary = kwargs.get("position_embeddings")
                module.__dict__["call"] = Call(router, adapter, hidden, rotary, kept, valid, margins)

            handles.append(modules[name].register_forward_pre_hook(note, with_kwargs=True))
        try:
            more = {"attention_mask": mask, "position_ids": positions}
            output = self.model(input_ids=ids, past_key_values=kept.cache, use_cache=True, **more)
        finally:
            for handle in handles:
                handle.remove()
            for name in self.routers:
                modules[name].__dict__.pop("call", None)
        self.margin = min([self.margin, *margins])
        return output.logits


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function: a softmax in float64 over `attended_pairs`, or over the mask where nothing routes."""
    call: Call | None = module.__dict__.get("call")
    if call is None:
        pairs = attention_mask if attention_mask is not None else _causal(query, key)
    else:
        pairs = attended_pairs(who_attends(call, query, key))
    repeat = query.shape[1] // key.shape[1]
    keys, values = (x.double().repeat_interleave(repeat, dim=1) for x in (key, value))
    scores = query.double() @ keys.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    if pairs.shape[1] not in (1, query.shape[1]):
        pairs = pairs.repeat_interleave(repeat, dim=1)
    weights = torch.softmax(scores.masked_fill(~pairs, -torch.inf), dim=-1).nan_to_num()
    return (weights @ values).to(query.dtype).transpose(1, 2).contiguous(), None


def _causal(query: Tensor, key: Tensor) -> Tensor:
    new, seen = query.shape[2], key.shape[2]
    return torch.ones(new, seen, dtype=torch.bool).tril(seen - new)[None, None]


def who_attends(call: Call, query: Tensor, key: Tensor) -> WhoAttends:
    """Who attends to whom in a routed layer's call, from what it keeps: no cache of the model's is looked at."""
    positions = torch.where(call.valid, call.valid.cumsum(dim=-1) - 1, PADDING)
    find = _cells if any(config.routing == "cells" for config in call.router.configs.values()) else _shared
    pattern, groups, reads = find(call, query, key, positions[:, -query.shape[2] :])
    if call.adapter is None:
        reads = torch.ones_like(reads)
    elif call.router.mode == "local":
        reads = torch.zeros_like(reads)
    return WhoAttends(pattern, positions, groups, reads)


def _shared(call: Call, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Pattern, Tensor, Tensor]:
    """A token's groups are a function of its hidden state under the adapter that was in force then; what another
    adapter cached, or the base model, is not known, and read by all."""
    router, owners = call.router, sorted(call.router.configs)
    name = call.adapter or owners[0]
    config, proj, centroids = router.configs[name], router.focus_proj[name], router.focus_centroids[name]
    scores = routing.group_scores(call.hidden, proj, centroids, config.temperature)
    scores = torch.nn.functional.pad(
        scores + router.focus_balance[name].detach().float(), (0, MOST_GROUPS - config.num_groups), value=-torch.inf
    )
    owner = torch.full_like(scores[..., :1], -1 if call.adapter is None else owners.index(name))
    scores, by = call.kept.groups.update(scores[:, None], owner[:, None], router.layer_idx)
    _note_margin(call, _lead(scores, config.top_k)[:, 0][call.valid & (by == owner[:, None, -1:])[:, 0, :, 0]])
    sets = routing.hard_memberships(scores, torch.zeros(MOST_GROUPS), config.top_k)
    codes = (sets.long() << torch.arange(MOST_GROUPS)).sum(dim=-1)
    reads = (codes[:, :, -query.shape[2] :, None] & torch.arange(2**MOST_GROUPS)) != 0
    codes = torch.where(by[..., 0] == owner[:, None, -1:, 0], codes, UNKNOWN)
    pattern = Pattern(config.local_window, config.sink_tokens, config.dense_below)
    return pattern, codes, reads[..., None]


def _lead(scores: Tensor, top_k: int) -> Tensor:
    """By how much the last group that a token is in leads the first that it is not in."""
    if top_k == scores.shape[-1] or scores.shape[-1] == 1:
        return torch.full_like(scores[..., 0], torch.inf)
    ranked = scores.sort(dim=-1, descending=True).values
    return ranked[..., top_k - 1] - ranked[..., top_k]


def _cells(call: Call, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Pattern, Tensor, Tensor]:
    """The group of a key is a function of it before rotary positions, whoever cached it."""
    router, name = call.router, call.adapter or sorted(call.router.configs)[0]
    config = router.configs[name]
    kinds = ("key_proj", "centroids", "balance", "query_proj", "band_proj", "cell_bias", "offset")
    own = cells.CellRouter(*(getattr(router, f"focus_{kind}")[name].detach().float() for kind in kinds))
    new = _without_rotary(key[:, :, -query.shape[2] :].double(), call.rotary)
    keys, _ = call.kept.groups.update(new, new, router.layer_idx)
    projected = keys.float() @ own.key_projection.mT @ own.centroids.mT
    _note_margin(call, _lead(projected + own.balance[:, None], 1).transpose(1, 2)[call.valid])
    pattern = Pattern(config.local_window, config.sink_tokens, config.dense_below, config.num_bands)
    limits = cells.cell_limits(positions, config.threshold, config.local_window, config.num_bands)
    reads = cells.cell_reads(query, own, limits)
    sizes = cells.positions_in_bands(positions, config.local_window, config.num_bands)[:, None].clamp(min=1)
    limit = config.threshold + own.offset[:, None, None] + sizes.float().log()
    shares = cells.cell_log_shares(query, own)[..., :-1].unflatten(-1, (-1, config.num_bands))
    margin = (shares - limit[..., None, :]).abs().amin(dim=(-1, -2)).transpose(1, 2)
    _note_margin(call, margin[call.valid[:, -query.shape[2] :]])
    return pattern, cells.key_groups(keys, own), reads


def _without_rotary(keys: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    """Keys turned back to where they were before rotary positions, which turn the first of their dimensions."""
    if rotary is None:
        return keys
    cosines, sines = (x.double()[:, None] for x in rotary)
    turned, rest = keys.split([cosines.shape[-1], keys.shape[-1] - cosines.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    back = turned * cosines - torch.cat([-second, first], dim=-1) * sines
    return torch.cat([back / (cosines.square() + sines.square()), rest], dim=-1)


def _note_margin(call: Call, leads: Tensor) -> None:
    if call.adapter is not None and leads.numel():
        call.margins.append(float(leads.abs().min()))


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
