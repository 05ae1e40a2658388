"""Attention weights as they are: the attention calls of routed layers, and weights, a few queries at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..adapter import FocusLayer, focus_layers

#: Queries whose weights are spelled out at a time; bounds memory at a group of heads times ``CHUNK x T``.
CHUNK = 256


@dataclass(frozen=True)
class AttentionCall:
    """What one attention call gets, of one sequence.

    Args:
        query: ``(H, T, D)``, positions applied.
        key: ``(H_kv, T, D)``, likewise.
        scale: factor on ``q . k``.
        softcap: Gemma-2's soft-capping of the scores.
        sinks: gpt-oss' learned sink logits, ``(H,)``.
        sliding: the layer's own sliding window: pairs at that distance or more do not attend, adapter or not.
    """

    query: Tensor
    key: Tensor
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    sliding: int | None = None

    def of_head(self, head: int) -> AttentionCall:
        """The part of one key/value head and the query heads that attend through it."""
        repeat = self.query.shape[0] // self.key.shape[0]
        part = slice(head * repeat, (head + 1) * repeat)
        sinks = None if self.sinks is None else self.sinks[part]
        return replace(self, query=self.query[part], key=self.key[head : head + 1], sinks=sinks)


@contextmanager
def attention_calls(model: nn.Module, look: Callable[[FocusLayer, AttentionCall], None]) -> Iterator[None]:
    """Within the block, ``look`` is told every attention call of layers that an adapter can route, dense or routed.

    `focus_hf.adapter.observe_attention` sees routed calls only; here the base model's own attention matters as much.
    For one sequence at a time, without a cache.
    """
    layers = {layer.get_base_layer(): layer for layer in focus_layers(model)}

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
            if module in layers:
                scale = kwargs.get("scaling")
                look(
                    layers[module],
                    AttentionCall(
                        query[0],
                        key[0],
                        query.shape[-1] ** -0.5 if scale is None else scale,
                        kwargs.get("softcap"),
                        kwargs.get("s_aux"),
                        kwargs.get("sliding_window"),
                    ),
                )
            return function(module, query, key, *args, **kwargs)

        return call

    names = {"focus", *(layer.config._attn_implementation for layer in layers)}
    before = {name: ALL_ATTENTION_FUNCTIONS.get(name) for name in names}
    for name, function in before.items():
        ALL_ATTENTION_FUNCTIONS[name] = watched(_eager if function is None else function)
    try:
        yield
    finally:
        for name, function in before.items():
            del ALL_ATTENTION_FUNCTIONS[name]  # what is registered shows through again,
            if ALL_ATTENTION_FUNCTIONS.get(name) is not function:  # unless somebody had put another in front of it
                ALL_ATTENTION_FUNCTIONS[name] = function


def _eager(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Attention of a model's own file, which is registered nowhere."""
    function = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    return function(module, *args, **kwargs)


def mean_weights(
    call: AttentionCall, allowed: Callable[[int, int], Tensor]
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Attention weights, mean over heads, for a stretch of queries after the other.

    Args:
        call: see `AttentionCall`.
        allowed: for queries ``start`` to ``stop``, the pairs that attend: bool ``(stop - start, stop)``.

    Yields:
        ``start``, ``stop``, distances ``i - j`` int64 ``(stop - start, stop)``, and float32 weights of that shape.
    """
    heads, length, _ = call.query.shape
    positions = torch.arange(length, device=call.query.device)
    for start in range(0, length, CHUNK):
        stop = min(start + CHUNK, length)
        distance = positions[start:stop, None] - positions[None, :stop]
        pairs = allowed(start, stop)
        if call.sliding is not None:
            pairs = pairs & (distance < call.sliding)
        total = call.query.new_zeros(distance.shape, dtype=torch.float32)
        of_key = heads // call.key.shape[0]
        for number, key in enumerate(call.key):
            part = slice(number * of_key, (number + 1) * of_key)
            scores = (call.query[part, start:stop].float() @ key[:stop].float().T) * call.scale
            if call.softcap is not None:
                scores = call.softcap * torch.tanh(scores / call.softcap)
            scores = scores.masked_fill(~pairs, float("-inf"))
            if call.sinks is not None:
                column = call.sinks[part].float()[:, None, None].expand(-1, stop - start, 1)
                scores = torch.cat([scores, column], dim=-1)
            total += scores.softmax(dim=-1)[..., :stop].sum(dim=0)
        yield start, stop, distance, total / heads


def strongest(weights: Tensor, distance: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest weights of each query, falling, and how far back they are.

    Args:
        weights: ``(Q, S)``, zero where it does not count.
        distance: ``(Q, S)``, positive wherever a weight is.
        count: how many.

    Returns:
        int32 and float32 ``(Q, count)``; zeros where there are fewer.
    """
    top = weights.topk(min(count, weights.shape[-1]), dim=-1)
    back = distance.gather(-1, top.indices).masked_fill(top.values <= 0, 0)
    missing = (0, count - top.values.shape[-1])
    return nn.functional.pad(back, missing).int(), nn.functional.pad(top.values.float(), missing)
