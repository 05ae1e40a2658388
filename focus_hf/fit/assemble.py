"""From fitted layers to an adapter: where pairs are spent, and the tensors in their places."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from torch import nn

from ..adapter import FocusConfig, focus_layers
from .budget import choose, choose_alike, mean_pairs, total_loss
from .costs import EVERYTHING, Cost, Option
from .layer import LayerFit
from .routers import Routers

#: What each option costs each head, by ``"LAYER.HEAD"``.
Table = dict[str, dict[Option, Cost]]

#: How heads attend, by the same names, as it stands in ``head_patterns``.
Patterns = dict[str, dict[str, Any]]


def cost_table(fitted: Mapping[int, LayerFit], length: int, recall: float = 0.0) -> Table:
    """The costs of all heads at one length; everything costs nothing in predictions, and all pairs.

    Args:
        fitted: by layer.
        length: of the windows on which they were measured.
        recall: share of tokens that are taken to recall what stands far back: so much of what an option does to recall
            is added to its loss.
    """
    table: Table = {}
    for layer, fit in sorted(fitted.items()):
        for head, costs in enumerate(fit.costs[length]):
            if recall:
                of_recall = fit.recall[length][head]
                costs = {o: Cost(cost.loss + recall * of_recall[o].loss, cost.pairs) for o, cost in costs.items()}
            table[f"{layer}.{head}"] = {**costs, EVERYTHING: Cost(0.0, 1.0)}
    return table


@dataclass(frozen=True)
class Budget:
    """How heads attend under a budget, and what was estimated.

    Args:
        wanted: mean share of pairs that was asked for.
        length: at which it holds.
        pairs: that are attended.
        loss: sum of the costs without what recall adds, in nats per token: an estimate of the divergence from dense
            predictions on ordinary text.
        heads: how many attend in which way.
        patterns: of each head, as in ``head_patterns``.
    """

    wanted: float
    length: int
    pairs: float
    loss: float
    heads: dict[str, int]
    patterns: Patterns


def choose_budget(
    table: Table, wanted: float, length: int, uniform: bool, headroom: float = 0.0, ordinary: Table | None = None
) -> Budget:
    """Choose how each head attends.

    Args:
        table: costs at the length at which the budget holds.
        wanted: mean share of pairs.
        length: at which the costs were measured.
        uniform: one option for all heads.
        headroom: share of the budget that is left over.
        ordinary: the costs without recall, if these are with it.

    Raises:
        ValueError: the budget is too small for any choice.
    """
    planned = wanted * (1 - headroom)
    try:
        chosen = choose_alike(table, planned) if uniform else choose(table, planned)
    except ValueError as error:
        raise error if not headroom else ValueError(f"pairs={wanted:g} less headroom={headroom:g}: {error}") from None
    patterns = {head: dict(option.pattern()) for head, option in chosen.items()}
    heads = Counter(str(pattern["attend"]) for pattern in patterns.values())
    loss = total_loss(table if ordinary is None else ordinary, chosen)
    return Budget(wanted, length, mean_pairs(table, chosen), loss, dict(heads), patterns)


def round_to_half(routed: nn.Module) -> None:
    """Round an adapter's numbers to what a file of 16 bits can hold; they stay of the type they are."""
    for layer in focus_layers(routed):
        for parameter in layer.parameters():
            parameter.data = parameter.data.half().to(parameter.dtype)


@torch.no_grad()
def add_adapter(model: nn.Module, config: FocusConfig, routers: Mapping[int, Routers | None]) -> PeftModel:
    """Add a fitted adapter to a model.

    Args:
        model: the base model.
        config: with ``head_patterns``; heads that attend by groups under some budget get their tensors.
        routers: by layer.
    """
    routed = get_peft_model(model, config)
    for layer in focus_layers(routed):
        heads = list(layer.configs["default"].heads_with_groups(layer.layer_idx))
        found = routers[layer.layer_idx]
        if not heads or found is None:
            continue
        for place, values in (
            (layer.focus_proj, found.key_projection),
            (layer.focus_query_proj, found.query_projection),
            (layer.focus_centroids, found.centroids),
            (layer.focus_balance, found.balance),
            (layer.focus_query_bias, found.query_bias),
        ):
            place["default"].copy_(values[heads])
    return routed.eval()
