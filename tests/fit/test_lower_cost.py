"""Queries taught by the cost of what they do not read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from focus_hf.attention import Pattern
from focus_hf.fit import lower_cost as lowering
from focus_hf.fit.curves import THRESHOLDS, at_places, cost_of, measure, place_of
from focus_hf.fit.importance import LayerWindow, cell_importance
from focus_hf.fit.lower_cost import lower_cost
from focus_hf.fit.query_router import train_query_router
from focus_hf.routing.cells import CellRouter, key_groups
from tests.fit.test_parts import fisher

LENGTH, TOPICS = 256, 8
PATTERN = Pattern(local_window=8, sink_tokens=4, num_bands=5)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def misleading_window(seed: int) -> LayerWindow:
    """Two query heads over one of keys. Tokens of topic 0 matter most one by one, and cancel each other out; those of
    topic 1 matter less and add up; the others do not matter."""
    generator = torch.Generator().manual_seed(seed)
    topic = torch.arange(LENGTH // 2).repeat_interleave(2) % TOPICS  # each token has a twin beside it
    keys = (5 * torch.eye(TOPICS)[topic] + 0.1 * normal(LENGTH, TOPICS, seed=seed))[None]
    queries = torch.zeros(2, LENGTH, TOPICS)
    queries[:, :, 0], queries[:, :, 1] = 2.0, 1.0
    queries += 0.1 * normal(2, LENGTH, TOPICS, seed=seed + 1)
    twin = torch.tensor([1.0, -1.0]).repeat(LENGTH // 2)
    values = torch.zeros(1, LENGTH, 6)
    values[0, :, 0] = torch.where(topic == 0, 3 * twin, torch.where(topic == 1, 3.0, 0.0))
    gradients = torch.zeros(2, LENGTH, 6)
    gradients[:, :, 0] = torch.randn(2, LENGTH, generator=generator)
    return LayerWindow(keys, keys, values, torch.arange(LENGTH), queries, gradients, scale=0.5)


def ranked_by_importance(windows: list[LayerWindow], often: Tensor) -> CellRouter:
    nothing = torch.zeros(2)
    axes = torch.eye(TOPICS)[None]
    router = CellRouter(axes, 5 * axes, torch.full((1, TOPICS), -12.5), nothing, nothing, nothing, nothing)
    found = []
    for window in windows:
        groups = key_groups(window.plain_keys[None], router)[0, 0]
        found.append(torch.stack([cell_importance(each, groups, PATTERN, TOPICS) for each in window.seen_by(2)]))
    queries = torch.cat([window.queries for window in windows], dim=1)
    generator = torch.Generator().manual_seed(0)
    return train_query_router(router, queries, torch.cat(found, dim=1), often, 200, generator)


def loss_at(share: float, router: CellRouter, windows: list[LayerWindow]) -> Tensor:
    curves = measure(windows, router, PATTERN)
    pairs, loss = (each.sum(dim=1).flip(-1) for each in (curves.pairs, curves.loss))
    wanted = float(curves.possible.sum()) * share
    places = torch.tensor([[place_of(wanted, of_head)] for of_head in pairs], dtype=torch.float64)
    return at_places(loss, places)[:, 0]


def test_what_cancels_is_left_out_for_what_adds_up():
    windows, others = [misleading_window(n) for n in range(4)], [misleading_window(n) for n in range(10, 12)]
    often = torch.ones(4 * LENGTH)
    ranked = ranked_by_importance(windows, often)
    router = lower_cost(ranked, windows, PATTERN, often, 200, torch.Generator().manual_seed(1))
    for name in ("key_projection", "centroids", "balance", "offset"):
        assert torch.equal(getattr(router, name), getattr(ranked, name))
    assert all(torch.equal(tensor, tensor.half().float()) for tensor in router.tensors().values())
    before, after = loss_at(0.2, ranked, others), loss_at(0.2, router, others)
    assert (after < 0.5 * before).all()


def one_chooser(router: CellRouter, number: int = 0) -> CellRouter:
    names = ("query_projection", "band_projection", "cell_bias", "offset")
    return replace(router, **{name: getattr(router, name)[number : number + 1] for name in names})


def test_sums_say_what_is_lost():
    """Cells, "near" and a learned sink, added up, give the cost of attention to them."""
    window = replace(misleading_window(0), sink_logits=torch.tensor([0.3, -0.2]))
    router = ranked_by_importance([misleading_window(0)], torch.ones(LENGTH))
    back = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    near = (back <= PATTERN.local_window) | (torch.arange(LENGTH) < PATTERN.sink_tokens)
    for number, seen in enumerate(window.seen_by(2)):
        sums = lowering._Queries.of([seen], one_chooser(router, number), PATTERN).sums
        cost, pairs = cost_of(sums.sum(dim=-1))
        torch.testing.assert_close(pairs, torch.arange(1, LENGTH + 1).float())
        torch.testing.assert_close(cost, torch.zeros(LENGTH), atol=1e-6, rtol=0)  # everything is attended
        wanted = fisher(seen, near) / 2
        torch.testing.assert_close(cost_of(sums[..., -1])[0].double(), wanted, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("idle", ["no gradient", "nothing far away"])
def test_where_there_is_nothing_to_choose_a_router_stays(idle):
    window = misleading_window(0)
    router = ranked_by_importance([window], torch.ones(LENGTH))
    if idle == "no gradient":
        window = replace(window, gradients=torch.zeros_like(window.gradients))
    else:
        names = {"keys": 1, "plain_keys": 1, "values": 1, "positions": 0, "queries": 1, "gradients": 1}
        window = replace(window, **{name: getattr(window, name).narrow(dim, 0, 12) for name, dim in names.items()})
    found = lower_cost(router, [window], PATTERN, torch.ones(len(window.positions)), 5, torch.Generator())
    assert all(torch.equal(a, b) for a, b in zip(found.tensors().values(), router.tensors().values(), strict=True))


def test_prices_are_what_a_pair_saves():
    windows = [misleading_window(n) for n in range(2)]
    router = ranked_by_importance(windows, torch.ones(2 * LENGTH))
    one = one_chooser(router)
    data = lowering._Queries.of([next(window.seen_by(2)) for window in windows], one, PATTERN)
    aims = lowering._aims(data, one, limit=1e9)  # damps nothing
    assert aims and all(aim.price > 0 and aim.threshold in THRESHOLDS for aim in aims)
    curves = measure([next(window.seen_by(2)) for window in windows], one, PATTERN)
    loss, pairs = (each[0].sum(dim=0) / (2 * LENGTH) for each in (curves.loss, curves.pairs))
    for aim in aims:
        place = THRESHOLDS.tolist().index(aim.threshold)
        slope = (loss[place + 2] - loss[place - 2]) / (pairs[place - 2] - pairs[place + 2])
        assert aim.price == pytest.approx(float(slope), rel=1e-3)
        assert aim.sum == pytest.approx(float(loss[place] + slope * pairs[place]), rel=1e-3)
