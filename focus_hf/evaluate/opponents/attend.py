"""Any transformers model under a selector: its attention layers read the pairs that are chosen, and no others.

What is computed is right, not fast: a mask for each block of queries, and dense attention under it. Memory is that
of one block. No Focus adapter is needed; where one is loaded, it must be off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ...adapter import PairCount
from ...adapter.discovery import find_attention, why_not
from .selector import Call, Choice, Selector, blocks, keys_at, less_scoring, products

#: Under which transformers knows the attention function.
IMPLEMENTATION = "focus_opponent"


@dataclass
class Counted(PairCount):
    """What was read, counted pair by pair, of all query heads."""

    nothing: ClassVar[str] = "No attention layer was called under the selector."

    def add_block(self, pairs: Tensor, kv_heads: int, first: int) -> None:
        """Count a block of queries from position ``first`` on: bool ``(B, H, R, end)``, of ``kv_heads`` key heads."""
        batch, heads, _, end = pairs.shape
        of_key_heads = pairs.unflatten(1, (kv_heads, -1))
        self.attended += int(pairs.sum())
        self.loaded += int(of_key_heads.any(dim=2).sum()) * of_key_heads.shape[2]
        self.possible += batch * heads * sum(range(first + 1, end + 1))


@dataclass(eq=False)
class Told:
    """A layer's configuration that names our attention function, and what that is told: the number of the layer, what
    chooses, how many keys a query may read by the context's length, what was read. All else is the layer's own.
    """

    config: Any
    layer: int
    selector: Selector
    keys_at: Callable[[int], int]
    counted: Counted

    _attn_implementation: ClassVar[str] = IMPLEMENTATION

    def __getattr__(self, name: str) -> Any:
        if name == "config":  # while it is copied
            raise AttributeError(name)
        return getattr(self.config, name)


@contextmanager
def attend_by(
    model: nn.Module,
    selector: Selector,
    share: float | None = None,
    *,
    keys: int | None = None,
    layers: Sequence[nn.Module] | None = None,
    count_scoring: bool = False,
) -> Iterator[Counted]:
    """Within the block, attention layers read what a selector chooses, and what they read is counted.

    The state is the model's: other models may run in other threads meanwhile, the same one runs under the selector.

    Args:
        model: a causal language model of transformers, its sequences without padding.
        selector: which pairs.
        share: of the causal pairs of each call's context, to be read.
        keys: in place of it, how many keys each query reads at most.
        layers: attention modules; those that Focus could route by default, see `routable_layers`.
        count_scoring: what choosing costs in products is part of the share.

    Raises:
        ValueError: not one budget, or no layer to attend in.
    """
    if (share is None) is (keys is None):
        raise ValueError(f"attend_by() takes either share or keys, got share={share!r} and keys={keys!r}.")
    if share is not None:
        keys_at(share, 1)
    if keys is not None and keys < 1:
        raise ValueError(f"keys must be at least 1, each query's own; got {keys!r}.")
    if count_scoring and share is None:
        raise ValueError("count_scoring is about a share of pairs: give share.")
    chosen: list[Any] = routable_layers(model) if layers is None else list(layers)
    if not chosen:
        raise ValueError(f"This {type(model).__name__} has no attention layer that a selector could choose pairs for.")

    def keys_of(length: int) -> int:
        if share is None:
            return int(keys or 0)
        return keys_at(less_scoring(share, selector, length) if count_scoring else share, length)

    counted = Counted()
    before = [layer.config for layer in chosen]
    try:
        for number, layer in enumerate(chosen):
            layer.config = Told(layer.config, number, selector, keys_of, counted)
        yield counted
    finally:
        for layer, config in zip(chosen, before, strict=True):
            layer.config = config


@contextmanager
def paused(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Within the block, layers that are in a block of `attend_by` read everything, and nothing is counted."""
    told: list[tuple[Any, Told]] = [(layer, layer.config) for layer in layers if isinstance(layer.config, Told)]
    try:
        for layer, before in told:
            layer.config = before.config
        yield
    finally:
        for layer, before in told:
            layer.config = before


def routable_layers(model: nn.Module) -> list[nn.Module]:
    """The attention modules whose pairs can be chosen: those that a Focus adapter could route."""
    return [module for name, module in find_attention(model) if why_not(name, module, include_sliding=False) is None]


def opponent_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function registered with transformers as ``"focus_opponent"``, see there; without dropout.

    Args:
        module: an attention module inside `attend_by`.
        query, key, value: ``(B, H, Q, D)`` of the last ``Q`` of ``S`` tokens, ``(B, H_kv, S, D)``,
            ``(B, H_kv, S, D_v)``.
        attention_mask: ``None``, or ``(B, 1 or H, Q, S)``, bool or additive.
        softcap: Gemma-2's soft-capping of the scores.

    Raises:
        NotImplementedError: the model hands over something else.
    """
    told: Any = module.config
    if not isinstance(told, Told):
        raise ValueError(f'"{IMPLEMENTATION}" attends inside attend_by() only.')
    for name in ("s_aux", "sinks", "position_bias"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"Opponents do not attend with {name}, which this model's layers hand over.")
    if attention_mask is not None and attention_mask.dim() != 4:
        raise NotImplementedError(
            f"Opponents read a mask (B, 1, Q, S), got {tuple(attention_mask.shape)}. Load the model with "
            'attn_implementation="sdpa".'
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = Call(query.float(), key.float(), value.float(), scale, told.keys_at(key.shape[2]), told.layer)
    read = told.selector.reader(call)
    outputs = []
    for first, end in blocks(call.start, call.length):
        choice = read(first, end)
        told.counted.add_block(choice.pairs.expand(*query.shape[:2], -1, -1), key.shape[1], first)
        mask = None if attention_mask is None else attention_mask[:, :, first - call.start : end - call.start, :end]
        outputs.append(_attend(call, first, end, choice, mask, softcap))
    return torch.cat(outputs, dim=2).to(query.dtype).transpose(1, 2).contiguous(), None


def _attend(call: Call, first: int, end: int, choice: Choice, mask: Tensor | None, softcap: float | None) -> Tensor:
    """A block of queries: float32 ``(B, H, R, D_v)``."""
    scores = _capped(products(call.queries(first, end), call.key[:, :, :end]) * call.scale, softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    scores = scores.masked_fill(~choice.pairs, -torch.inf)
    value = call.value[:, :, :end]
    if (means := choice.estimate) is not None:
        others = _capped(products(call.queries(first, end), means.key) * call.scale, softcap) + means.log_sizes
        scores, value = torch.cat([scores, others], dim=-1), torch.cat([value, means.value], dim=2)
    return products(scores.softmax(dim=-1), value.transpose(-1, -2))


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * (scores / softcap).tanh()


AttentionInterface.register(IMPLEMENTATION, opponent_attention)
