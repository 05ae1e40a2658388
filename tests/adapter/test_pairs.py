"""Counting the pairs that a model attends to."""

from __future__ import annotations

import math
from typing import Any

import pytest

import focus_hf
from focus_hf.adapter import Seen, focus_layers, observe_attention, observe_pairs, observe_routing, routing_mode
from focus_hf.routing.cells import cell_log_shares
from tests.families import CELLS, ROUTINGS, WINDOW, focus_model, logits, token_ids

SINKS = 2


def pairs_of_cells(seen: Seen, sequence: int, chooser: int) -> int:
    """By the words of the definition, pair after pair; which group a key is in is asked of the observed call."""
    config = seen.layer.routing_config
    shares = cell_log_shares(seen.query, seen.layer.cell_router("default"))[..., :-1]
    shares = shares.unflatten(-1, (-1, config.num_bands))
    offset = float(seen.layer.cell_router("default").offset[chooser])
    head = chooser * int(config.key_value_heads or 0) // config.choosers
    groups, length = seen.who.key_groups[sequence, head].tolist(), seen.query.shape[2]
    edges = [WINDOW * 2**band for band in range(config.num_bands)]
    count = 0
    for i in range(length):
        for j in range(i + 1):
            distance = i - j
            if distance <= WINDOW or j < SINKS:
                count += 1
                continue
            band = max(b for b, edge in enumerate(edges) if distance > edge)
            last = band == len(edges) - 1
            inside = [d for d in range(1, i + 1) if d > edges[band] and (last or d <= 2 * edges[band])]
            share = float(shares[sequence, chooser, i, groups[j], band]) - math.log(len(inside))
            count += share > config.threshold + offset
    return count


@pytest.mark.parametrize("routing", ["cells", "each"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_pairs_of_cells_are_those_of_the_definition(family: str, routing: str) -> None:
    model, ids = focus_model(family, **ROUTINGS[routing]), token_ids(batch=2, length=40)
    seen: list[Seen] = []
    with observe_attention(model, seen.append), observe_pairs(model) as counted:
        logits(model, ids, use_cache=False)
    heads = focus_layers(model)[0].routing_config.choosers
    attended = [sum(pairs_of_cells(call, row, h) for h in range(heads) for row in range(2)) / heads for call in seen]
    assert counted.possible == len(seen) * 2 * 40 * 41 // 2
    assert counted.attended == pytest.approx(sum(attended))
    assert 0.2 < counted.share < 1


def test_every_mode_and_the_dial_are_counted() -> None:
    model, ids = focus_model("llama"), token_ids(batch=2, length=40)
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
    assert local < shares[1] < shares[2] < shares[4] == 1


def test_short_contexts_are_counted_too() -> None:
    model, seen = focus_model("llama", **CELLS), []
    with observe_pairs(model) as counted, observe_routing(model, lambda *call: seen.append(call)):
        logits(model, token_ids(length=WINDOW))
    assert counted.share == 1 and len(seen) == 6


@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_first_sequence_alone(routing: str) -> None:
    model, ids = focus_model("llama", **ROUTINGS[routing]), token_ids(batch=3, length=40)
    with observe_pairs(model, first_only=True) as first:
        logits(model, ids)
    with observe_pairs(model) as alone:
        logits(model, ids[:1])
    assert (first.attended, first.possible) == (alone.attended, alone.possible)
    assert all(not layer.is_observed for layer in focus_layers(model))


def test_nothing_to_count_is_said() -> None:
    model: Any = focus_model("llama")
    with observe_pairs(model) as counted, model.disable_adapter():
        logits(model, token_ids())
    with pytest.raises(ValueError, match="not active"):
        _ = counted.share
