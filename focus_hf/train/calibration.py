"""Calibrate the balance potentials, so that hard memberships fill all groups of a domain evenly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .. import ranks, routing
from ..adapter import FocusLayer, Router, focus_layers, observe_routing, routing_mode
from ..evaluate.modes import device_of, in_evaluation


def calibration_sample(windows: Tensor, count: int) -> Tensor:
    """At most ``count`` windows ``(n, T)``, evenly spread over a text, by which its groups are balanced."""
    return windows[:: max(1, len(windows) // count)][:count]


@torch.no_grad()
def calibrate(model: nn.Module, batches: Iterable[Tensor], rounds: int = 3) -> dict[str, float]:
    """Set each layer's balance potentials from a sample of the domain.

    A layer's input depends on how the layers before it route, so scores are collected and potentials solved for a few
    times over. With a hard gate, scores are also given the spread that they had in training (`FocusConfig.sharpness`):
    probabilities of groups then mean what they meant there, and memberships stay.

    Args:
        model: a model with an active Focus adapter.
        batches: token ids ``(B, T)`` without padding; a few dozen sequences are enough.
        rounds: passes over the batches.

    Returns:
        Share of memberships held by the largest group of every layer, measured in a pass of its own afterwards;
        ``1 / K`` is perfect balance.

    Raises:
        ValueError: there are no batches, or the heads have groups of their own.
    """
    if focus_layers(model)[0].routing_config.by_cells:
        raise ValueError(
            'calibrate() balances groups that all heads of a layer share. With routing="cells" each head\'s groups '
            "are balanced when the adapter is fitted: fit it again on text of the domain."
        )
    batches = list(batches)
    if not batches:
        raise ValueError("calibrate() needs at least one batch of token ids, got none.")
    sharpness = focus_layers(model)[0].routing_config.training_sharpness
    if sharpness is not None:  # the spread that training's softmax saw
        for layer, scores in _collect_scores(model, batches).items():
            factor = sharpness / routing.score_spread(scores[None]).item()
            for kind in (layer.focus_centroids, layer.focus_balance):
                parameter = kind[str(layer.routing_adapter)]
                ranks.assign(parameter, ranks.whole(parameter) * factor)
    for _ in range(rounds):
        for layer, scores in _collect_scores(model, batches).items():
            parameter = layer.focus_balance[str(layer.routing_adapter)]
            balance = ranks.whole(parameter)
            new = routing.calibrate_balance(scores, layer.routing_config.top_k, balance)
            ranks.assign(parameter, new.to(balance.dtype))
    return largest_groups(model, batches)


@torch.no_grad()
def largest_groups(model: nn.Module, batches: Iterable[Tensor]) -> dict[str, float]:
    """Share of memberships held by the largest group of every layer (or head that routes by itself), by name."""
    counts: dict[Router, Tensor] = {}

    def count(router: Router, scores: Tensor, memberships: Tensor) -> None:
        counts[router] = counts.get(router, 0) + memberships.flatten(0, 1).sum(dim=0).double()

    _read(model, batches, count)
    return {router.name: float((members / members.sum()).max()) for router, members in counts.items()}


def _collect_scores(model: nn.Module, batches: list[Tensor]) -> dict[FocusLayer, Tensor]:
    """Scores ``(tokens, K)`` of every layer while the model runs in hard mode."""
    collected: dict[FocusLayer, list[Tensor]] = defaultdict(list)

    def keep(layer: FocusLayer, scores: Tensor, memberships: Tensor) -> None:
        collected[layer].append(scores.flatten(0, 1))

    _read(model, batches, keep)
    return {layer: torch.cat(parts) for layer, parts in collected.items()}


def _read(model: nn.Module, batches: Iterable[Tensor], observer: Callable[[Any, Tensor, Tensor], None]) -> None:
    """Run the model in hard mode."""
    with in_evaluation(model), routing_mode(model, "hard"), observe_routing(model, observer):
        for input_ids in batches:
            model(input_ids=input_ids.to(device_of(model)), use_cache=False)
