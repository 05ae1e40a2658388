"""Perplexity of a model with a Focus adapter, beside dense and local-only attention and the pairs each computes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from ..adapter import FocusLayer, focus_layers, observe_routing, routing_mode, set_routing
from ..attention import Pattern, count_pairs


@dataclass(frozen=True)
class QualityRow:
    """One line of a quality table.

    Args:
        mode: ``"dense"`` (adapter off), ``"local"`` (window and sinks only) or ``"hard"`` (Focus).
        top_k: groups per token in hard mode, else ``None``.
        perplexity: ``exp`` of the mean loss per predicted token.
        pairs: share of the possible query-key pairs that routed layers attend to, 0 to 1.
    """

    mode: str
    top_k: int | None
    perplexity: float
    pairs: float

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


@torch.no_grad()
def perplexity(model: nn.Module, windows: Tensor, batch_size: int = 4) -> float:
    """Perplexity over windows of consecutive tokens, each read from scratch.

    Args:
        model: a causal language model.
        windows: token ids ``(N, T)``, ``T >= 2``, without padding.
        batch_size: windows at a time.

    Raises:
        ValueError: there is nothing to predict.
    """
    if windows.dim() != 2 or windows.shape[0] == 0 or windows.shape[1] < 2:
        raise ValueError(f"perplexity() needs windows of token ids (N, T) with T >= 2, got {tuple(windows.shape)}.")
    total = 0.0
    with _evaluation(model):
        for batch in windows.split(batch_size):
            batch = batch.to(_device(model))
            total += float(model(input_ids=batch, labels=batch, use_cache=False).loss) * batch.shape[0]
    return math.exp(total / windows.shape[0])


@torch.no_grad()
def attended_share(model: nn.Module, windows: Tensor, batch_size: int = 4) -> float:
    """Share of possible pairs that the routed layers attend to in the current mode, counted pair by pair."""
    attended = possible = 0

    def count(layer: FocusLayer, scores: Tensor, memberships: Tensor) -> None:
        nonlocal attended, possible
        config = layer.configs[str(layer.routing_adapter)]
        pairs = count_pairs(Pattern(config.local_window, config.sink_tokens), memberships)
        attended, possible = attended + pairs[0], possible + pairs[1]

    with _evaluation(model), observe_routing(model, count):
        for batch in windows.split(batch_size):
            model(input_ids=batch.to(_device(model)), use_cache=False)
    if possible == 0:
        raise ValueError("No layer was routed: the Focus adapter is not active.")
    return attended / possible


def quality_table(
    model: nn.Module, windows: Tensor, top_ks: Iterable[int] | None = None, batch_size: int = 4
) -> Iterator[QualityRow]:
    """Measure dense, local-only and Focus attention on the same windows, one row at a time.

    Args:
        model: a model with an active Focus adapter.
        windows: token ids ``(N, T)``.
        top_ks: values of ``top_k`` to measure; the adapter's own by default. The model keeps its own afterwards.
        batch_size: windows at a time.
    """
    layers = focus_layers(model)
    own = layers[0].configs[str(layers[0].routing_adapter)].top_k
    with _adapters_off(layers):
        yield QualityRow("dense", None, perplexity(model, windows, batch_size), 1.0)
    with routing_mode(model, "local"):
        yield _measure(model, "local", None, windows, batch_size)
    for top_k in [own] if top_ks is None else top_ks:
        set_routing(model, top_k=top_k)
        try:
            with routing_mode(model, "hard"):
                row = _measure(model, "hard", top_k, windows, batch_size)
        finally:
            set_routing(model, top_k=own)
        yield row


def _measure(model: nn.Module, mode: str, top_k: int | None, windows: Tensor, batch_size: int) -> QualityRow:
    # Pairs hardly vary between windows, and counting them costs more than running the model.
    pairs = attended_share(model, windows[:batch_size], batch_size)
    return QualityRow(mode, top_k, perplexity(model, windows, batch_size), pairs)


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def _adapters_off(layers: list[FocusLayer]) -> Iterator[None]:
    """Dense attention for the block; unlike `disable_adapters`, other adapters (LoRA) stay on."""
    was = [layer.disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, disabled in zip(layers, was, strict=True):
            layer._disable_adapters = disabled


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
