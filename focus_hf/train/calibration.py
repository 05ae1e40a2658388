"""Calibrate the balance potentials, so that hard memberships fill all groups of a domain evenly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .. import ranks, routing
from ..adapter import FocusLayer, focus_layers, observe_routing, routing_mode


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
        ValueError: there are no batches.
    """
    batches = list(batches)
    if not batches:
        raise ValueError("calibrate() needs at least one batch of token ids, got none.")
    _scale(model, batches)
    for _ in range(rounds):
        for layer, scores in _collect_scores(model, batches).items():
            parameter = layer.focus_balance[str(layer.routing_adapter)]
            balance = ranks.whole(parameter)
            new = routing.calibrate_balance(scores, layer.routing_config.top_k, balance)
            ranks.assign(parameter, new.to(balance.dtype))
    return largest_groups(model, batches)


def _scale(model: nn.Module, batches: list[Tensor]) -> None:
    """Give every layer's scores the spread that its training's softmax saw."""
    sharpness = focus_layers(model)[0].routing_config.training_sharpness
    if sharpness is None:
        return
    for layer, scores in _collect_scores(model, batches).items():
        factor = sharpness / routing.score_spread(scores[None]).item()
        for kind in (layer.focus_centroids, layer.focus_balance):
            parameter = kind[str(layer.routing_adapter)]
            ranks.assign(parameter, ranks.whole(parameter) * factor)


@torch.no_grad()
def largest_groups(model: nn.Module, batches: Iterable[Tensor]) -> dict[str, float]:
    """Share of memberships held by the largest group of every routed layer, by layer name."""
    shares = {}
    for layer, scores in _collect_scores(model, list(batches)).items():
        balance = ranks.whole(layer.focus_balance[str(layer.routing_adapter)]).float()
        memberships = routing.hard_memberships(scores, balance, layer.routing_config.top_k)
        shares[layer.name] = float(routing.group_shares(memberships).max())
    return shares


def _collect_scores(model: nn.Module, batches: list[Tensor]) -> dict[FocusLayer, Tensor]:
    """Scores ``(tokens, K)`` of every layer while the model runs in hard mode."""
    collected: dict[FocusLayer, list[Tensor]] = defaultdict(list)

    def keep(layer: FocusLayer, scores: Tensor, memberships: Tensor) -> None:
        collected[layer].append(scores.flatten(0, 1))

    was_training = model.training
    device = next(focus_layers(model)[0].parameters()).device
    model.eval()
    try:
        with routing_mode(model, "hard"), observe_routing(model, keep):
            for input_ids in batches:
                model(input_ids=input_ids.to(device), use_cache=False)
    finally:
        model.train(was_training)
    return {layer: torch.cat(parts) for layer, parts in collected.items()}
