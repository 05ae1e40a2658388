"""The ways of attending that an evaluation compares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..adapter import FocusLayer, focus_layers, routing_mode, set_routing
from ..records.results import mode_name

#: What costs the same as Focus: a window and sinks with as many pairs, random groups, groups by token.
OPPONENTS = ("window",)

#: Dense (adapter off), window and sinks only, the gated attention of training, Focus as it runs, and its opponents.
MODES = ("dense", "local", "soft", "hard", *OPPONENTS)


@dataclass(frozen=True)
class Mode:
    """One of `MODES`.

    At the adapter's own ``top_k`` heads that have a ``top_k`` of their own keep it; at another one all take that.

    Args:
        name: which.
        top_k: of ``"hard"``, and of the Focus row that an opponent is compared with.
        width: of ``"window"``; ``None`` until it is known how many pairs Focus attends to.
        budget: one of the adapter's, by its share of pairs; how it attends now by default.
    """

    name: str
    top_k: int | None = None
    width: int | None = None
    budget: str | None = None

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Mode:
        """The mode that a row was measured in."""
        return cls(row["mode"], row.get("top_k"), row.get("width"), row.get("budget"))

    def __str__(self) -> str:
        return mode_name(self.name, self.top_k, self.width, self.budget)


def list_modes(names: Iterable[str], top_ks: Iterable[int], budgets: Sequence[str] = ()) -> list[Mode]:
    """Modes by name, hard at each ``top_k``, or at each budget, with its opponents beside it.

    Raises:
        ValueError: an unknown name.
    """
    names = list(names)
    if unknown := [name for name in names if name not in MODES]:
        raise ValueError(f"modes must be of {', '.join(MODES)}, got {unknown[0]!r}.")
    focus = [name for name in MODES if name in names and name in ("hard", *OPPONENTS)]
    plain = [Mode(name) for name in names if name not in focus]
    settings = [(top_k, budget) for top_k in top_ks for budget in (budgets or (None,))]
    return plain + [Mode(name, top_k, budget=budget) for top_k, budget in settings for name in focus]


@contextmanager
def attending(model: nn.Module, mode: Mode, text: Tensor | None = None) -> Iterator[None]:
    """Within the block the model is in eval mode and attends in this mode; afterwards as before.

    Args:
        model: with a Focus adapter.
        mode: a window has its width, see `equal_window`.
        text: token ids by whose frequencies ``"tokens"`` is balanced.
    """
    layers = focus_layers(model)
    configs = {id(config): config for layer in layers for config in layer.configs.values()}.values()
    before = [(config, config.top_k, config.pairs, config.threshold) for config in configs]
    with in_evaluation(model):
        try:
            if mode.name == "dense":
                with adapters_off(layers):
                    yield
            else:
                if mode.budget is not None:
                    set_routing(model, pairs=float(mode.budget))
                if mode.top_k not in (None, layers[0].routing_config.top_k):
                    set_routing(model, top_k=mode.top_k)
                with routing_mode(model, mode.name, mode.width):
                    yield
        finally:
            for config, top_k, pairs, threshold in before:
                config.top_k, config.pairs, config.threshold = top_k, pairs, threshold


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
    """Where the model's inputs go: to the first weights that are on a device, and not kept elsewhere (``meta``)."""
    return next(weight.device for weight in model.parameters() if weight.device.type != "meta")
