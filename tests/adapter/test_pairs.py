"""Counting the pairs that a model attends to, heads of every kind among them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import focus_hf
from focus_hf.adapter import focus_layers, observe_pairs, observe_routing, routing_mode
from tests.adapter.test_heads import heads_model
from tests.families import WINDOW, focus_model, logits, token_ids

SINKS = 2


def inputs_of(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """What enters each routed attention module."""
    seen: list[torch.Tensor] = []

    def keep(module: Any, args: Any, kwargs: Any) -> None:
        seen.append((args[0] if args else kwargs["hidden_states"]).detach())

    handles = [
        layer.get_base_layer().register_forward_pre_hook(keep, with_kwargs=True) for layer in focus_layers(model)
    ]
    logits(model, ids)
    for handle in handles:
        handle.remove()
    return seen


def pairs_of_head(layer: Any, head: int, hidden: torch.Tensor) -> int:
    """By the words of the definition, pair after pair, for one sequence ``(T, d)``."""
    config = layer.routing_config
    how = config.head_pattern(layer.layer_idx, head)
    length = len(hidden)
    if how.attend == "everything":
        return length * (length + 1) // 2
    belongs, reads = [-1] * length, [set()] * length
    if how.attend == "groups":
        place = config.heads_with_groups(layer.layer_idx).index(head)
        tensors = {
            kind: getattr(layer, f"focus_{kind}")["default"][place].detach().double()
            for kind in ("proj", "query_proj", "centroids", "balance", "query_bias")
        }
        tokens = hidden.double()
        keys = tokens @ tensors["proj"].T @ tensors["centroids"].T / config.temperature + tensors["balance"]
        queries = tokens @ tensors["query_proj"].T @ tensors["centroids"].T / config.temperature
        queries = queries + tensors["query_bias"]
        belongs = keys.argmax(dim=-1).tolist()
        reads = [set(row) for row in queries.topk(how.top_k, dim=-1).indices.tolist()]
    return sum(
        i - j <= how.local_window or j < SINKS or belongs[j] in reads[i] for i in range(length) for j in range(i + 1)
    )


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_pairs_of_heads_are_those_of_the_definition(family: str) -> None:
    model, ids = heads_model(family), token_ids(batch=2, length=40)
    seen: list[Any] = []
    with observe_pairs(model) as counted, observe_routing(model, lambda *call: seen.append(call)):
        hidden = inputs_of(model, ids)
    num_heads = focus_layers(model)[0].routing_config.key_value_heads
    attended = [
        sum(pairs_of_head(layer, head, row) for head in range(num_heads) for row in rows) / num_heads
        for layer, rows in zip(focus_layers(model), hidden, strict=True)
    ]
    assert counted.possible == len(attended) * 2 * 40 * 41 // 2
    assert counted.attended == pytest.approx(sum(attended))
    assert counted.share == pytest.approx(sum(attended) / counted.possible)
    assert 0.2 < counted.share < 1 and seen


def test_every_mode_and_the_dial_are_counted() -> None:
    model, ids = heads_model("llama"), token_ids(batch=2, length=40)
    local = sum(i - j <= WINDOW or j < SINKS for i in range(40) for j in range(i + 1)) / (40 * 41 // 2)
    shares = {}
    with routing_mode(model, "local"), observe_pairs(model) as counted:
        logits(model, ids)
    assert counted.share == pytest.approx(local)
    for top_k in (1, 2, 4):
        focus_hf.set_routing(model, top_k=top_k)
        with observe_pairs(model) as counted:
            logits(model, ids)
        shares[top_k] = counted.share
    assert local < shares[1] < shares[2] < shares[4] < 1


def test_heads_with_shared_routing_are_counted_one_by_one() -> None:
    model, ids = heads_model("llama", "shared"), token_ids(batch=1, length=40)
    config = focus_layers(model)[0].routing_config
    with observe_pairs(model) as counted:
        logits(model, ids)
    config.head_patterns = {
        f"{layer}.{head}": {"attend": "everything"} for layer in range(3) for head in range(config.key_value_heads)
    }
    with observe_pairs(model) as everything:
        logits(model, ids)
    assert counted.share < everything.share == 1


def test_the_first_sequence_alone() -> None:
    model, ids = focus_model("llama"), token_ids(batch=3, length=40)
    with observe_pairs(model, first_only=True) as first:
        logits(model, ids)
    with observe_pairs(model) as alone:
        logits(model, ids[:1])
    assert (first.attended, first.possible) == (alone.attended, alone.possible)
    assert all(layer.pairs_observer is None for layer in focus_layers(model))


def test_nothing_to_count_is_said() -> None:
    model = focus_model("llama")
    with observe_pairs(model) as counted, model.disable_adapter():
        logits(model, token_ids())
    with pytest.raises(ValueError, match="not active"):
        _ = counted.share
