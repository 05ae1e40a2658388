"""The mathematics of a fit, against its definitions computed in full."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from focus_hf.attention import Pattern
from focus_hf.attention.definition import WhoAttends, attended_pairs
from focus_hf.fit import curves as measuring
from focus_hf.fit import query_router
from focus_hf.fit.clusters import balanced_kmeans, cluster_keys, reduce_directions
from focus_hf.fit.curves import THRESHOLDS, HeadCurves, at_places, cost_of, joined, measure, octave, place_of
from focus_hf.fit.dial import dial, offsets, pairs_curves
from focus_hf.fit.importance import DenseRows, LayerWindow, cell_importance, cells_of_keys, sums_by_cell
from focus_hf.fit.layer import evenly_often
from focus_hf.fit.query_router import train_query_router
from focus_hf.routing.cells import CellRouter, cell_limits, cell_log_shares, cell_reads, key_groups
from focus_hf.settings import check_fields

LENGTH, GROUPS = 70, 5
PATTERN = Pattern(local_window=4, sink_tokens=3, num_bands=3)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def head_window(**changes: Any) -> LayerWindow:
    """One key/value head with three query heads."""
    window = LayerWindow(
        keys=normal(1, LENGTH, 8, seed=3),
        plain_keys=normal(1, LENGTH, 8, seed=9),
        values=normal(1, LENGTH, 6, seed=4),
        positions=torch.randperm(LENGTH, generator=torch.Generator().manual_seed(1))[:40].sort().values,
        queries=2 * normal(3, 40, 8, seed=2),
        gradients=normal(3, 40, 6, seed=5),
        scale=0.4,
    )
    return dataclasses.replace(window, **changes)


def layer_window(heads: int = 2) -> LayerWindow:
    """Two key/value heads with three query heads each; its plain keys are others than those that meet queries."""
    return head_window(
        keys=torch.stack([normal(LENGTH, 8, seed=n) for n in range(heads)]),
        plain_keys=normal(heads, LENGTH, 8, seed=9),
        values=normal(heads, LENGTH, 6, seed=10),
        queries=torch.cat([normal(3, 40, 8, seed=20 + n) for n in range(heads)]),
        gradients=normal(3 * heads, 40, 6, seed=11),
    )


def cell_router(heads: int = 2, per_key_head: int = 3) -> CellRouter:
    width = per_key_head * 8
    return CellRouter(
        normal(heads, 4, 8, seed=30),
        normal(heads, GROUPS, 4, seed=31),
        normal(heads, GROUPS, seed=32),
        0.3 * normal(heads, 4, width, seed=33),
        0.3 * normal(heads, PATTERN.num_bands + 1, width, seed=34),
        normal(heads, GROUPS * PATTERN.num_bands + 1, seed=35),
        torch.zeros(heads),
    )


def outputs(window: LayerWindow, attended: Tensor) -> Tensor:
    """Attention's output ``(r, R, D_v)`` under a mask ``(R, T)``, in float64 from its formula."""
    scores = window.queries.double() @ window.keys.double().mT * window.scale
    if window.softcap is not None:
        scores = window.softcap * torch.tanh(scores / window.softcap)
    weights = torch.where(attended, scores.exp(), 0.0)
    total = weights.sum(dim=-1, keepdim=True)
    if window.sink_logits is not None:
        total = total + window.sink_logits.double().exp()[:, None, None]
    return weights / total @ window.values.double()


def fisher(window: LayerWindow, attended: Tensor) -> Tensor:
    """Of each query, ``(R,)``."""
    causal = torch.arange(window.keys.shape[1]) <= window.positions[:, None]
    change = outputs(window, attended & causal) - outputs(window, causal)
    return (change * window.gradients.double()).sum(dim=-1).square().sum(dim=0)


@pytest.mark.parametrize(
    "changes",
    [{}, {"softcap": 2.0}, {"sink_logits": torch.tensor([0.5, -1.0, 2.0])}],
    ids=["plain", "softcap", "learned sinks"],
)
def test_the_cost_of_a_part_of_the_keys_is_that_of_attention_to_them(changes):
    window = head_window(**changes)
    rows = DenseRows.of(window)
    attended = torch.rand(40, LENGTH, generator=torch.Generator().manual_seed(2)) < 0.5
    attended[:, 0] = True
    weights = (rows.weights * attended).sum(-1) + rows.sink_weight[..., 0]
    effects = (rows.effects * attended).sum(-1) + rows.sink_effect[..., 0]
    found, pairs = cost_of(torch.cat([weights, effects, attended.sum(-1)[None]]))
    torch.testing.assert_close(2 * found.double(), fisher(window, attended), rtol=1e-3, atol=1e-6)
    assert torch.equal(pairs.long(), attended.sum(-1))


def test_cells_are_those_of_the_definition():
    """Reading one cell attends to its keys, and to what is near."""
    positions = torch.tensor([2, 5, 30, 69])
    groups = torch.arange(LENGTH) % GROUPS
    cells = cells_of_keys(groups, positions, PATTERN, GROUPS)
    for cell in range(GROUPS * PATTERN.num_bands):
        reads = torch.zeros(1, 1, LENGTH, GROUPS * PATTERN.num_bands, dtype=torch.bool)
        reads[..., cell] = True
        reads = reads.unflatten(-1, (GROUPS, PATTERN.num_bands))
        who = WhoAttends(PATTERN, torch.arange(LENGTH)[None], groups[None, None], reads)
        attended = attended_pairs(who)[0, 0, positions]
        causal = torch.arange(LENGTH) <= positions[:, None]
        assert torch.equal(attended, ((cells == cell) | (cells == GROUPS * PATTERN.num_bands)) & causal)


def test_importance_of_cells_is_a_sum_over_their_keys():
    window = head_window()
    groups = torch.arange(LENGTH) % GROUPS
    found = cell_importance(window, groups, PATTERN, GROUPS)
    causal = torch.arange(LENGTH) <= window.positions[:, None]
    output = outputs(window, causal)
    scores = torch.where(causal, window.queries.double() @ window.keys.double().mT * window.scale, -torch.inf)
    cells = cells_of_keys(groups, window.positions, PATTERN, GROUPS)
    for row, position in enumerate(window.positions.tolist()):
        expected = torch.zeros(GROUPS * PATTERN.num_bands + 1, dtype=torch.float64)
        for head, key in itertools.product(range(3), range(position + 1)):
            effect = window.gradients[head, row].double() @ (window.values[0, key].double() - output[head, row])
            expected[cells[row, key]] += (scores[head, row].softmax(-1)[key] * effect).abs()
        torch.testing.assert_close(found[row].double(), expected, rtol=1e-4, atol=1e-6)


def test_parts_of_a_window_add_up_to_it(monkeypatch):
    window, groups = head_window(), torch.arange(LENGTH) % GROUPS
    whole = cell_importance(window, groups, PATTERN, GROUPS)
    monkeypatch.setattr("focus_hf.fit.importance._SCORES", 16 * LENGTH)
    assert [len(part.positions) for part in window.parts()] == [16, 16, 8]
    torch.testing.assert_close(cell_importance(window, groups, PATTERN, GROUPS), whole)


def test_curves_are_the_costs_and_pairs_of_the_definition_under_every_threshold():
    window, router = layer_window(), cell_router()
    found, heads = measure([window], router, PATTERN), list(window.seen_by(len(window.keys)))
    assert float(found.queries.sum()) == 40
    assert float(found.possible.sum()) == int((window.positions + 1).sum())
    groups, positions = key_groups(window.plain_keys[None], router), torch.arange(LENGTH)[None]
    for place in range(40, len(THRESHOLDS), 9):
        reads = torch.zeros(1, 2, LENGTH, GROUPS, PATTERN.num_bands, dtype=torch.bool)
        limits = cell_limits(window.positions[None], float(THRESHOLDS[place]), PATTERN.local_window, PATTERN.num_bands)
        reads[:, :, window.positions] = cell_reads(window.queries[None], router, limits)
        attended = attended_pairs(WhoAttends(PATTERN, positions, groups, reads))[0][:, window.positions]
        for head in range(2):
            loss = fisher(heads[head], attended[head]).sum() / 2
            assert float(found.loss[head, :, place].sum()) == pytest.approx(float(loss), rel=1e-3, abs=1e-5)
            assert float(found.pairs[head, :, place].sum()) == int(attended[head].sum())
    for band in range(PATTERN.num_bands):
        wide = dataclasses.replace(PATTERN, local_window=PATTERN.local_window << band)
        nothing = torch.zeros(1, 1, LENGTH, 1, 1, dtype=torch.bool)
        who = WhoAttends(wide, positions, torch.zeros(1, 1, LENGTH, dtype=torch.uint8), nothing)
        attended = attended_pairs(dataclasses.replace(who, pattern=dataclasses.replace(wide, num_bands=1)))[0, 0]
        loss = fisher(heads[1], attended[window.positions]).sum() / 2
        assert float(found.window_loss[1, :, band].sum()) == pytest.approx(float(loss), rel=1e-3, abs=1e-5)
        assert float(found.window_pairs[:, band].sum()) == int(attended[window.positions].sum())


def test_an_offset_is_a_shift_of_the_threshold():
    window, router = layer_window(), cell_router()
    plain = measure([window], router, PATTERN)
    shift = torch.tensor([0.5, -1.25])
    shifted = plain.shifted(shift)
    for place in (40, 60):
        for head in range(2):
            there = place + round(float(shift[head]) * 4)
            torch.testing.assert_close(shifted.loss[head, :, place], plain.loss[head, :, there])
            torch.testing.assert_close(shifted.pairs[head, :, place], plain.pairs[head, :, there])


def test_octaves_hold_the_positions_below_powers_of_two():
    for length in (128, 1024, 8192):
        assert int(octave(torch.tensor(length - 1))) + 1 == int(octave(torch.tensor(length)))
    assert octave(torch.tensor([0, 1, 15, 16, 31, 32])).tolist() == [0, 0, 0, 1, 1, 2]


def simple_curves(prices: list[float]) -> HeadCurves:
    """Heads whose loss falls with their pairs like an exponential; queries at positions below 1,024."""
    octaves, grid = measuring.OCTAVES, len(THRESHOLDS)
    share = torch.linspace(1, 0.1, grid, dtype=torch.float64)
    queries, possible = torch.zeros(2, octaves, dtype=torch.float64)
    queries[3:7], possible[3:7] = 10.0, torch.tensor([1e3, 2e3, 4e3, 8e3], dtype=torch.float64)
    pairs = (share * possible[:, None]).expand(len(prices), -1, -1)
    loss = torch.stack([price * (-8 * share).exp() * queries[:, None] for price in prices])
    window_share = torch.tensor([0.1, 0.3, 0.5], dtype=torch.float64)
    window_loss = torch.stack([2 * price * (-8 * window_share).exp() * queries[:, None] for price in prices])
    return HeadCurves(loss, pairs, window_loss, window_share * possible[:, None], queries, possible)


def test_offsets_give_more_to_heads_that_lose_more():
    found = offsets(simple_curves([1.0, 1.0, 20.0]))
    assert float(found[0]) == pytest.approx(float(found[1]), abs=1e-3)
    assert float(found[2]) < float(found[0]) - 0.2  # reads below a lower threshold
    assert torch.equal(found, found.half().float())
    assert offsets(simple_curves([1.0, 1.0])).abs().max() == 0


def test_a_head_that_a_part_leads_astray_does_harm_to_no_share():
    """It takes an average of everything: a part loses more than nothing, so an average of what it would choose at each
    share (nothing, or nearly everything) is the worst that it can have."""
    curves = simple_curves([1.0] * 9)
    share = curves.pairs[-1] / curves.possible.clamp(min=1)[:, None]
    curves.loss[-1] = curves.queries[:, None] * ((share < 0.75) + 3 * (-(((share - 0.45) / 0.15) ** 2)).exp())
    none, chosen = (
        [point.loss for point in dial(curves.shifted(each), 1024, (0.15, 0.25))]
        for each in (torch.zeros(9), offsets(curves))
    )
    assert chosen[0] < 0.98 * none[0] and chosen[1] < 0.9 * none[1]


def test_places_are_between_those_of_a_list():
    values = torch.tensor([[1.0, 3.0, 7.0], [0.0, 2.0, 4.0]]).double()
    places = torch.tensor([-1.0, 0.0, 0.5, 1.75, 2.0, 9.0]).double()
    assert at_places(values, places).tolist() == [[1.0, 1.0, 2.0, 6.0, 7.0, 7.0], [0.0, 0.0, 1.0, 3.5, 4.0, 4.0]]
    for value in (1.0, 2.0, 6.0, 7.0):
        assert float(at_places(values[0], torch.tensor([place_of(value, values[0])]).double())) == pytest.approx(value)


def test_the_dial_falls_and_a_window_loses_what_it_loses():
    curves = simple_curves([1.0, 3.0])
    points = dial(curves, 1024, (0.05, 0.2, 0.3, 0.4, 0.9))
    assert [point.pairs for point in points] == [0.2, 0.3, 0.4, 0.9]  # the least that there is takes 0.1
    assert all(one.loss > other.loss and one.threshold > other.threshold for one, other in itertools.pairwise(points))
    for point in points:
        assert point.loss == pytest.approx(4 * torch.exp(torch.tensor(-8 * point.pairs)).item(), rel=0.03)
    at_window = next(point for point in points if point.pairs == 0.3)
    assert at_window.window_loss == pytest.approx(8 * torch.exp(torch.tensor(-2.4)).item(), rel=0.01)
    assert points[-1].window_loss < 0.2 * at_window.window_loss


def test_curves_of_pairs_are_what_a_configuration_may_hold():
    curves = pairs_curves(simple_curves([1.0, 3.0]))
    check_fields({"pairs_curves": curves}, "here")
    assert list(curves) == ["100", "200", "400", "800"]
    for points in curves.values():
        assert points[0][1] == pytest.approx(0.1) and points[-1][1] == pytest.approx(1.0)


def test_heads_of_layers_are_joined():
    one, other = simple_curves([1.0]), simple_curves([2.0, 3.0])
    both = joined([one, other])
    assert both.loss.shape[0] == both.pairs.shape[0] == both.window_loss.shape[0] == 3
    torch.testing.assert_close(both.loss[1:], other.loss)


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


def test_groups_of_keys_are_even_with_the_numbers_that_are_saved():
    keys = normal(2, 3000, 12) * torch.linspace(0.2, 3, 12)
    router = cluster_keys(keys, 8, 6, torch.Generator().manual_seed(0))
    for tensor in router.tensors().values():
        assert torch.equal(tensor, tensor.half().float())
    groups = key_groups(keys[None], router)[0]
    for of_head in groups:
        assert torch.bincount(of_head.long(), minlength=8).max() < 1.5 * 3000 / 8


def test_directions_keep_what_tells_centroids_apart():
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(6, 3, generator=generator) @ torch.randn(3, 12, generator=generator) + 5
    axes, along = reduce_directions(flat, 4)
    torch.testing.assert_close(axes[:3] @ axes[:3].T, torch.eye(3), rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.cdist(along, along), torch.cdist(flat, flat), rtol=1e-4, atol=1e-4)
    assert reduce_directions(flat[:2], 9)[0].shape == (9, 12)  # more directions than centroids


def test_queries_learn_which_cells_to_read():
    """Each query needs one cell, told by its vector; scores are those by which the adapter reads."""
    heads, groups, bands, width = 2, 4, 2, 16
    queries = normal(heads, 4000, width, seed=2) + 3
    axes, centroids = normal(heads, 8, 8, seed=3), normal(heads, groups, 8, seed=4)
    of_group, of_band = normal(heads, 8, width, seed=5), 2 * normal(heads, bands, width, seed=6)
    by_group = (queries - 3) @ of_group.transpose(1, 2) @ centroids.transpose(1, 2)
    truth = by_group[..., None] + ((queries - 3) @ of_band.transpose(1, 2))[..., None, :]
    best = truth.flatten(-2).argmax(dim=-1)
    importance = torch.nn.functional.one_hot(best, groups * bands + 1).float()
    importance[..., -1] = 0.2
    generator = torch.Generator().manual_seed(0)
    nothing = torch.zeros(heads)
    router = CellRouter(axes, centroids, nothing[:, None], nothing, nothing, nothing, nothing)
    router = train_query_router(router, queries[:, :3000], importance[:, :3000], torch.ones(3000), 600, generator)
    by_query_head = queries[:, 3000:].unflatten(-1, (2, 8)).transpose(1, 2).flatten(0, 1)
    shares, near = cell_log_shares(by_query_head[None], router)[0].tensor_split([-1], dim=-1)
    hit = (shares.argmax(dim=-1) == best[:, 3000:]).float().mean()
    assert hit > 0.85
    torch.testing.assert_close(shares.exp().sum(-1) + near[..., 0].exp(), torch.ones(heads, 1000))
    projections = (router.centroids, router.query_projection, router.band_projection, router.cell_bias)
    learned = query_router._scores(queries[:, 3000:], *projections).log_softmax(dim=-1)[..., :-1]
    torch.testing.assert_close(learned, shares, rtol=1e-3, atol=1e-3)


def test_every_octave_of_positions_teaches_as_much():
    short, long = torch.arange(1, 2048, 2), torch.arange(7, 8192, 8)
    positions = torch.cat([short.repeat(8), long])
    often = evenly_often(positions)
    of_octave = [often[(positions >= start) & (positions < 2 * start)].sum() for start in (512, 1024, 2048, 4096)]
    early = often[positions < 512].sum()
    torch.testing.assert_close(torch.stack([early, *of_octave]), torch.ones(5))
    assert (often[positions < 512] == often[0]).all()


def test_sums_by_cell_keep_leading_dimensions():
    values = normal(2, 3, 10)
    cells = torch.arange(10)[None].expand(3, -1) % 4
    found = sums_by_cell(values, cells, 5)
    assert found.shape == (2, 3, 5) and found[..., 4].abs().max() == 0
    torch.testing.assert_close(found[..., 1], values[..., [1, 5, 9]].sum(-1))
