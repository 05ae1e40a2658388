"""How many operations a layer launches, and how often it waits for the device: true on any machine, without a GPU.

A GPU is fed by launches from the host, some microseconds each, and stands still whenever the host reads a value back.
Both are counted in one layer of a small Llama, in prefill and for one decoded token, dense beside every path of Focus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from peft import get_peft_model
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from focus_hf.adapter import FocusConfig, focus_layers, set_routing
from focus_hf.bench import Setting
from focus_hf.evaluate.modes import adapters_off

from .counting import LaunchCounter
from .stand_in import FlashStandIn

#: Sequences in a batch: what is counted must not grow with it.
BATCHES = (1, 2, 8)

#: Ways to compute a prompt, by routing: a path and a backend. ``torch-flash`` is what CUDA runs, asked by a stand-in.
PREFILL = {
    "shared": (("grouped", "torch-flash"), ("grouped", "cpu-flash"), ("masked", "any")),
    "cells": (("native", "any"), ("masked", "any")),
}

#: Ways to compute a new token, by either routing.
DECODE = (("native", "any"), ("masked", "any"))


@dataclass(frozen=True)
class Launches:
    """What one layer asks of the device, by batch size.

    Args:
        phase: ``"prefill"``, or ``"decode"`` of one token.
        setting: tokens of the prompt (cached ones in decoding), groups, window.
        routing: ``"shared"``, or ``"cells"``.
        path: how Focus was computed.
        dense, focus: operations, views and allocations left out.
        syncs: times that Focus' host waits for the device.
        waits_for: what it waits for, in the largest batch.
    """

    phase: str
    setting: Setting
    routing: str
    path: str
    dense: dict[int, int]
    focus: dict[int, int]
    syncs: dict[int, int]
    waits_for: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values = asdict(self)
        return {"kind": f"launches: {values.pop('phase')}", **values.pop("setting"), **values}


@torch.no_grad()
def count_launches(setting: Setting, batches: Sequence[int] = BATCHES) -> Iterator[Launches]:
    """Count every path of shared routing and of routing by cells, in prefill and decoding.

    Args:
        setting: length, groups and window; sizes of heads play no part.
        batches: to count at.
    """
    for routing, ways in PREFILL.items():
        model = _model(setting, routing)
        _prefill(model, setting, batch=1)()  # what is done once for each adapter
        for phase, (path, kernel) in [*(("prefill", way) for way in ways), *(("decode", way) for way in DECODE)]:
            _route(model, path, kernel)
            yield _counts(model, setting, batches, phase, routing, f"{path}, {kernel}")


def _counts(model: Any, setting: Setting, batches: Sequence[int], phase: str, routing: str, path: str) -> Launches:
    make_call = _prefill if phase == "prefill" else _decode
    focus, dense = [], []
    for batch in batches:
        focus.append(_count(model, make_call(model, setting, batch)))
        with adapters_off(focus_layers(model)):
            dense.append(_count(model, make_call(model, setting, batch)))
    return Launches(
        phase,
        setting,
        routing,
        path,
        dict(zip(batches, (counter.operations.total() for counter in dense), strict=True)),
        dict(zip(batches, (counter.operations.total() for counter in focus), strict=True)),
        dict(zip(batches, (counter.syncs.total() for counter in focus), strict=True)),
        dict(focus[-1].syncs),
    )


def _prefill(model: Any, setting: Setting, batch: int) -> Callable[[], Any]:
    ids = torch.arange(batch * setting.length).remainder(model.config.vocab_size).view(batch, setting.length)
    past = DynamicCache(config=model.config)
    return lambda: model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1)


def _decode(model: Any, setting: Setting, batch: int) -> Callable[[], Any]:
    """One token after a prompt that is cached, and after another token."""
    past = _prefill(model, setting, batch)().past_key_values
    ids = torch.zeros(batch, 1, dtype=torch.long)

    def step() -> Any:
        return model(input_ids=ids, past_key_values=past, use_cache=True)

    step()
    return step


def _count(model: Any, call: Callable[[], Any]) -> LaunchCounter:
    """What the model's last layer does in a call; the first one also does what is done once for all of them."""
    counter, last = LaunchCounter(), model.get_base_model().model.layers[-1]

    def start(*_: Any) -> None:
        counter.__enter__()

    def stop(*_: Any) -> None:
        counter.__exit__(None, None, None)

    hooks = last.register_forward_pre_hook(start), last.register_forward_hook(stop, always_call=True)
    try:
        call()
    finally:
        for hook in hooks:
            hook.remove()
    return counter


def _route(model: Any, path: str, kernel: str) -> None:
    set_routing(model, path=path)
    stand_in = FlashStandIn() if kernel == "torch-flash" else None
    for layer in focus_layers(model):
        layer.kernel = stand_in


def _model(setting: Setting, routing: str) -> Any:
    """A Llama of two layers, as small as its code allows: sizes decide nothing here."""
    torch.manual_seed(setting.seed)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=setting.length + 2,
        )
    )
    config = FocusConfig(
        num_groups=setting.num_groups,
        top_k=setting.top_k,
        local_window=setting.local_window,
        sink_tokens=setting.sink_tokens,
        routing=routing,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(base, config).eval()
