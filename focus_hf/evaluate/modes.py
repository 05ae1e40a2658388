"""The ways of attending that an evaluation compares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..adapter import FocusLayer, focus_layers, routing_mode, set_routing
from ..adapter.discovery import find_attention
from ..records.results import OPPONENTS, mode_name
from .opponents import SINKS, Counted, attend_by, keys_at, make_selector, paused

#: Dense (adapter off), window and sinks only, the gated attention of training, Focus as it runs, and its opponents.
MODES = ("dense", "local", "soft", "hard", *OPPONENTS)


@dataclass(frozen=True)
class Mode:
    """One of `MODES`.

    Args:
        name: which.
        top_k: of ``"hard"``, and of the Focus row that an opponent is compared with.
        width: of an opponent: for each query it reads as many keys as a window of this width and 4 first tokens;
            ``None`` until it is known how many pairs Focus attends to.
        budget: the share of pairs that is asked of Focus, with routing by cells, tuned to the length of the text; as
            it attends now by default.
    """

    name: str
    top_k: int | None = None
    width: int | None = None
    budget: str | None = None

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Mode:
        """The mode that a row was measured in."""
        return cls(row["mode"], row.get("top_k"), row.get("width"), row.get("budget"))

    @property
    def columns(self) -> dict[str, Any]:
        """What a `Row` that is measured in it says of it."""
        return {"mode": self.name, "top_k": self.top_k, "width": self.width, "budget": self.budget}

    def __str__(self) -> str:
        return mode_name(self.name, self.top_k, self.width, self.budget)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured in a mode: ``mode`` is its name, for the others see `Mode`."""

    mode: str
    top_k: int | None = None
    width: int | None = None
    budget: str | None = None

    def __str__(self) -> str:
        return mode_name(self.mode, self.top_k, self.width, self.budget)

    def to_dict(self) -> dict[str, Any]:
        """As it stands in `focus_hf.records.Results`."""
        return asdict(self)


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


def with_cache(modes: Iterable[Mode]) -> list[Mode]:
    """Those that go on after a cache: soft attention looks at whole sequences."""
    return [mode for mode in modes if mode.name != "soft"]


def at_share(mode: Mode, share: float, length: int) -> Mode:
    """An opponent with the width at which it reads a share of the pairs of contexts of this length."""
    return replace(mode, width=max(0, keys_at(share, length) - 1 - SINKS))


@contextmanager
def attending(model: nn.Module, mode: Mode, text: Tensor | None = None) -> Iterator[Counted | None]:
    """Within the block the model is in eval mode and attends in this mode, also inside another mode's block;
    afterwards as before.

    Args:
        model: with a Focus adapter.
        mode: an opponent has its width, see `at_share`.
        text: token ids ``(N, T)`` that will be judged: a share of pairs is tuned to contexts of ``T`` tokens;
            streaming heads are measured on the first ones.

    Yields:
        The pairs that an opponent reads; of other modes ``None``, see `attended_share`.
    """
    layers = focus_layers(model)
    with in_evaluation(model):
        if mode.name == "dense":
            with adapters_off(layers), paused(routed_modules(model)):
                yield None
        elif mode.name in OPPONENTS:
            if mode.width is None:
                raise ValueError(f"mode {mode.name!r} needs a width: at_share() finds it.")
            modules = routed_modules(model)
            with adapters_off(layers):
                with paused(modules):
                    selector = make_selector(mode.name, model, text, modules)
                with attend_by(model, selector, keys=mode.width + 1 + SINKS, layers=modules) as counted:
                    yield counted
        else:
            with _routed_as(model, layers, mode, None if text is None else text.shape[-1]):
                yield None


@contextmanager
def _routed_as(model: nn.Module, layers: list[FocusLayer], mode: Mode, length: int | None) -> Iterator[None]:
    """Focus, in one of its own modes, at another ``top_k`` or share of pairs."""
    configs = {id(config): config for layer in layers for config in layer.configs.values()}.values()
    before = [(config, config.top_k, config.pairs, config.threshold) for config in configs]
    try:
        if mode.budget is not None:
            set_routing(model, pairs=float(mode.budget), length=length)
        if mode.top_k not in (None, layers[0].routing_config.top_k):
            set_routing(model, top_k=mode.top_k)
        with routing_mode(model, mode.name):
            yield
    finally:
        for config, top_k, pairs, threshold in before:
            config.top_k, config.pairs, config.threshold = top_k, pairs, threshold


def routed_modules(model: nn.Module) -> list[nn.Module]:
    """The attention modules that the Focus adapter routes."""
    attention = [module for _, module in find_attention(model)]
    return [module for module in attention if any(isinstance(child, FocusLayer) for child in module.children())]


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
