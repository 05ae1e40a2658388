"""The ways of attending that an evaluation compares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from ..adapter import FocusLayer, focus_layers, routing_mode, set_routing
from ..records.results import mode_name

#: Dense (adapter off), window and sinks only, the gated attention of training, and Focus as it runs.
MODES = ("dense", "local", "soft", "hard")


@dataclass(frozen=True)
class Mode:
    """One of `MODES`; ``top_k`` is for ``"hard"``.

    At the adapter's own ``top_k`` heads that have a ``top_k`` of their own keep it; at another one all take that.
    """

    name: str
    top_k: int | None = None

    def __str__(self) -> str:
        return mode_name(self.name, self.top_k)


def list_modes(names: Iterable[str], top_ks: Iterable[int]) -> list[Mode]:
    """Modes by name, hard at each ``top_k``.

    Raises:
        ValueError: an unknown name.
    """
    chosen: list[Mode] = []
    for name in names:
        if name not in MODES:
            raise ValueError(f"modes must be of {', '.join(MODES)}, got {name!r}.")
        chosen += [Mode(name, top_k) for top_k in top_ks] if name == "hard" else [Mode(name)]
    return chosen


@contextmanager
def attending(model: nn.Module, mode: Mode) -> Iterator[None]:
    """Within the block the model is in eval mode and attends in this mode; afterwards as before."""
    layers = focus_layers(model)
    configs = {id(config): config for layer in layers for config in layer.configs.values()}.values()
    before = [(config, config.top_k, config.head_patterns) for config in configs]
    with in_evaluation(model):
        try:
            if mode.name == "dense":
                with adapters_off(layers):
                    yield
            else:
                if mode.top_k not in (None, focus_layers(model)[0].routing_config.top_k):
                    set_routing(model, top_k=mode.top_k)
                with routing_mode(model, mode.name):
                    yield
        finally:
            for config, top_k, head_patterns in before:
                config.top_k, config.head_patterns = top_k, head_patterns


@contextmanager
def adapters_off(layers: list[FocusLayer]) -> Iterator[None]:
    """Dense attention for the block; unlike `disable_adapters`, other adapters (LoRA) stay on."""
    was = [layer.disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, disabled in zip(layers, was, strict=True):
            layer._disable_adapters = disabled


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Within the block the model is in eval mode."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def device_of(model: nn.Module) -> torch.device:
    """Where the model's inputs go."""
    return next(model.parameters()).device
