"""The mathematics of a fit, against its definitions computed in full."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from focus_hf.attention import Pattern
from focus_hf.attention.mask import WhoAttends, attended_pairs
from focus_hf.fit.budget import choose, choose_alike, mean_pairs, total_loss
from focus_hf.fit.clusters import balanced_kmeans, reduce_directions
from focus_hf.fit.costs import EVERYTHING, Cost, Option, option_costs
from focus_hf.fit.importance import DenseRows, HeadWindow
from focus_hf.fit.linear import ridge
from focus_hf.fit.query_router import group_importance, train_query_router

LENGTH, GROUPS, SINKS = 70, 5, 3


def head_window(length: int = LENGTH, rows: int = 40, **changes: Any) -> HeadWindow:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    positions = torch.randperm(length, generator=generator)[:rows].sort().values
    window = HeadWindow(
        positions, 2 * normal(3, rows, 8), normal(length, 8), normal(length, 6), normal(3, rows, 6), 0.4
    )
    return dataclasses.replace(window, **changes)


def outputs(window: HeadWindow, attended: Tensor) -> Tensor:
    """Attention's output ``(r, R, D_v)`` under a mask ``(R, T)``, in float64 from its formula."""
    scores = window.queries.double() @ window.keys.double().T * window.scale
    if window.softcap is not None:
        scores = window.softcap * torch.tanh(scores / window.softcap)
    weights = torch.where(attended, scores.exp(), 0.0)
    total = weights.sum(dim=-1, keepdim=True)
    if window.sink_logits is not None:
        total = total + window.sink_logits.double().exp()[:, None, None]
    return weights / total @ window.values.double()


def fisher(window: HeadWindow, attended: Tensor) -> float:
    causal = torch.arange(len(window.keys)) <= window.positions[:, None]
    change = outputs(window, attended & causal) - outputs(window, causal)
    return float((change * window.gradients.double()).sum(dim=-1).square().sum())


@pytest.mark.parametrize(
    "changes",
    [{}, {"softcap": 2.0}, {"sink_logits": torch.tensor([0.5, -1.0, 2.0])}],
    ids=["plain", "softcap", "learned sinks"],
)
def test_costs_are_those_of_the_definition_of_attention(changes):
    window = head_window(**changes)
    generator = torch.Generator().manual_seed(2)
    key_groups = torch.randint(GROUPS, (LENGTH,), generator=generator)
    scores = torch.randn(LENGTH, GROUPS, generator=generator)
    options = [Option(w, k) for w in (0, 4, 9, 30) for k in range(GROUPS + 1)]
    found = option_costs(DenseRows.of(window), options, SINKS, key_groups, scores[window.positions])
    assert set(found) == set(options)
    members = torch.nn.functional.one_hot(key_groups, GROUPS).bool()
    for option, (cost, pairs) in found.items():
        reads = torch.zeros_like(scores, dtype=torch.bool)
        reads.scatter_(1, scores.topk(option.top_k, dim=1).indices, True)
        pattern = Pattern(option.local_window, SINKS)
        who = WhoAttends(pattern, torch.arange(LENGTH)[None], members[None], reads=reads[None])
        attended = attended_pairs(who)[0, 0, window.positions]
        assert pairs == int(attended.sum())
        assert cost == pytest.approx(fisher(window, attended), rel=1e-4, abs=1e-6), option


def test_parts_of_a_window_add_up_to_it(monkeypatch):
    window = head_window()
    options = [Option(4), Option(4, 2)]
    key_groups, scores = torch.arange(LENGTH) % GROUPS, torch.randn(40, GROUPS)
    whole = option_costs(DenseRows.of(window), options, SINKS, key_groups, scores)
    monkeypatch.setattr("focus_hf.fit.importance._ROWS", 16)
    parts = list(map(DenseRows.of, window.parts()))
    assert [len(part.positions) for part in parts] == [16, 16, 8]
    sums = {option: [0.0, 0.0] for option in options}
    for number, part in enumerate(parts):
        found = option_costs(part, options, SINKS, key_groups[: part.length], scores[16 * number : 16 * number + 16])
        for option, amounts in found.items():
            sums[option] = [a + b for a, b in zip(sums[option], amounts, strict=True)]
    for option in options:
        assert sums[option] == pytest.approx(whole[option], rel=1e-4)


def test_importance_of_groups_is_a_sum_over_their_distant_keys():
    window = head_window()
    rows = DenseRows.of(window)
    key_groups = torch.arange(LENGTH) % GROUPS
    found = group_importance(rows, key_groups, GROUPS, rows.is_far(5, SINKS))
    causal = torch.arange(LENGTH) <= window.positions[:, None]
    output = outputs(window, causal)
    scores = torch.where(causal, window.queries.double() @ window.keys.double().T * window.scale, -torch.inf)
    for row, position in enumerate(window.positions.tolist()):
        expected = torch.zeros(GROUPS, dtype=torch.float64)
        for head, key in itertools.product(range(3), range(SINKS, position - 5)):
            effect = window.gradients[head, row].double() @ (window.values[key].double() - output[head, row])
            expected[key_groups[key]] += (scores[head, row].softmax(-1)[key] * effect).abs()
        torch.testing.assert_close(found[row].double(), expected, rtol=1e-4, atol=1e-6)


def test_clusters_are_found_and_of_equal_size():
    generator = torch.Generator().manual_seed(0)
    centres = 6 * torch.randn(4, 10, generator=generator)
    which = torch.arange(400) % 4
    points = centres[which] + 0.1 * torch.randn(400, 10, generator=generator)
    found = balanced_kmeans(points, 4, generator)
    nearest = torch.cdist(points, found).argmin(dim=1)
    assert all(len(set(nearest[which == group].tolist())) == 1 for group in range(4))
    assert sorted(torch.bincount(nearest, minlength=4).tolist()) == [100] * 4
    blob = torch.cat([torch.randn(300, 10, generator=generator), 8 + torch.randn(20, 10, generator=generator)])
    groups = balanced_kmeans(blob, 8, generator)
    assert groups.isfinite().all() and len(groups.unique(dim=0)) == 8
    with pytest.raises(ValueError, match="3 points cannot make 4 groups"):
        balanced_kmeans(points[:3], 4, generator)


def test_directions_keep_what_tells_centroids_apart():
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(6, 3, generator=generator) @ torch.randn(3, 12, generator=generator) + 5
    axes, along = reduce_directions(flat, 4)
    torch.testing.assert_close(axes[:3] @ axes[:3].T, torch.eye(3), rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.cdist(along, along), torch.cdist(flat, flat), rtol=1e-4, atol=1e-4)
    assert reduce_directions(flat[:2], 9)[0].shape == (9, 12)  # more directions than centroids


def test_least_squares_finds_a_linear_map():
    generator = torch.Generator().manual_seed(0)
    inputs, weights = torch.randn(500, 12, generator=generator), torch.randn(5, 12, generator=generator)
    torch.testing.assert_close(ridge(inputs + 3, inputs @ weights.T - 7), weights, rtol=0, atol=1e-2)


def test_queries_learn_which_groups_to_read():
    generator = torch.Generator().manual_seed(0)
    truth, hidden = torch.randn(2, GROUPS, 12, generator=generator), torch.randn(4000, 12, generator=generator)
    best = torch.einsum("nkd,td->ntk", truth, hidden).argmax(dim=-1)
    targets = torch.nn.functional.one_hot(best, GROUPS).float() * torch.rand(4000, 1, generator=generator)
    start, centroids = torch.randn(2, 8, 12, generator=generator), torch.randn(2, GROUPS, 8, generator=generator)
    weights, bias = train_query_router(hidden[:3000], targets[:, :3000], start, centroids, 300, generator)
    scores = torch.einsum("nkg,ngd,td->ntk", centroids, weights, hidden[3000:]) + bias[:, None]
    assert (scores.argmax(dim=-1) == best[:, 3000:]).float().mean() > 0.9


amounts = st.integers(0, 64).map(lambda count: count / 64)  # sums of these are exact


@st.composite
def cost_tables(draw) -> dict[str, dict[Option, Cost]]:
    heads = draw(st.integers(1, 4))
    choices = [draw(st.lists(st.tuples(amounts, amounts), min_size=1, max_size=4)) for _ in range(heads)]
    return {
        f"0.{head}": {Option(w): Cost(*cost) for w, cost in enumerate(found)} | {EVERYTHING: Cost(0.0, 1.0)}
        for head, found in enumerate(choices)
    }


@settings(max_examples=200, deadline=None)
@given(cost_tables(), amounts)
def test_a_choice_keeps_within_its_budget_and_comes_near_the_best(table, budget):
    """Against all choices there are: within the budget, and at most one head's step away from the best."""
    every = [dict(zip(table, choice, strict=True)) for choice in itertools.product(*table.values())]
    affordable = [choice for choice in every if mean_pairs(table, choice) <= budget]
    if not affordable:
        with pytest.raises(ValueError, match="is too small"):
            choose(table, budget)
        return
    chosen = choose(table, budget)
    assert mean_pairs(table, chosen) <= budget
    best = min(total_loss(table, choice) for choice in affordable)
    step = max(cost.loss for costs in table.values() for cost in costs.values())
    assert best - 1e-9 <= total_loss(table, chosen) <= best + step + 1e-9
    alike = choose_alike({head: table["0.0"] for head in table}, 1.0)
    assert len(set(alike.values())) == 1


@settings(max_examples=100, deadline=None)
@given(cost_tables(), amounts, amounts)
def test_more_pairs_never_cost_more(table, one, other):
    found = []
    for budget in sorted((one, other)):
        try:
            found.append(total_loss(table, choose(table, budget)))
        except ValueError:
            found.append(float("inf"))
    assert found[1] <= found[0] + 1e-9
