"""Heads to which a window does better than cells."""

from __future__ import annotations

import pytest
import torch

from focus_hf.attention import Pattern
from focus_hf.fit import FitRecipe
from focus_hf.fit.curves import THRESHOLDS, measure
from focus_hf.fit.importance import LayerWindow
from focus_hf.fit.layer import fit_layer
from focus_hf.fit.windowed import as_windows, better_as_windows
from focus_hf.routing.cells import CellRouter, cell_limits, cell_reads
from tests.fit.test_fit import LENGTH, TOPICS, copying_window
from tests.fit.test_parts import simple_curves

PATTERN = Pattern(local_window=8, sink_tokens=4, num_bands=5)


def averaging_window(seed: int) -> LayerWindow:
    """As `copying_window`, but the second head takes an average of everything, and one topic alone is not as the
    others: it matters most, and read by itself it is all that there is."""
    window = copying_window(seed)
    topic = window.keys[0].argmax(dim=-1)
    window.keys[1] *= 100  # of normal numbers: groups are there, and queries do not tell them apart
    noise = torch.randn(LENGTH, 6, generator=torch.Generator().manual_seed(seed + 100))
    window.values[1] = 8.0 * (topic == 0)[:, None] + 0.3 * noise
    window.plain_keys[1] = 5 * torch.eye(TOPICS)[topic] + window.keys[1]
    return window


def router(heads: int) -> CellRouter:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    cells = TOPICS * PATTERN.num_bands + 1
    return CellRouter(
        *(normal(heads, *shape) for shape in ((4, 8), (TOPICS, 4), (TOPICS,), (4, 8), (PATTERN.num_bands + 1, 8))),
        normal(heads, cells),
        torch.zeros(heads),
    )


def test_windows_are_taken_where_they_lose_less_at_as_many_pairs():
    curves = simple_curves([1.0] * 4)  # windows lose twice as much
    assert not better_as_windows(curves).any()
    curves.window_loss[1] /= 2.6  # a little less than cells: not enough
    curves.window_loss[2] /= 4
    curves.loss[3] = 0  # and nothing is nothing
    curves.window_loss[3] = 0
    assert better_as_windows(curves).tolist() == [False, False, True, False]


def test_bands_open_one_after_the_other_for_all_groups_and_queries():
    curves, heads = measure([copying_window(0)], router(2), PATTERN), torch.tensor([0, 1]).bool()
    found = as_windows(router(2), heads, curves, PATTERN)
    assert all(
        torch.equal(tensor, tensor.half().float()) for tensor in (found.cell_bias[1], found.query_projection[1])
    )
    for name in ("query_projection", "band_projection", "cell_bias"):
        assert torch.equal(getattr(found, name)[0], getattr(router(2), name)[0]), "other heads stay"
    assert float(found.cell_bias[1].exp().sum()) == pytest.approx(1, abs=0.01)
    queries, positions = copying_window(1).queries[None], torch.arange(LENGTH)[None]
    opened = []
    for threshold in THRESHOLDS.tolist():
        reads = cell_reads(queries, found, cell_limits(positions, threshold, 8, PATTERN.num_bands))[0, 1]
        assert torch.equal(reads, reads[:, :1].expand_as(reads)), "all groups alike"
        bands = reads[-1, 0].long()
        assert bands.tolist() == sorted(bands.tolist(), reverse=True), "the nearest first"
        opened.append(int(bands.sum()))
    assert opened == sorted(opened, reverse=True) and {0, PATTERN.num_bands} <= set(opened)
    assert len(set(opened)) >= 4, "one by one"


def test_a_wider_window_may_lose_more():
    curves = measure([copying_window(0)], router(2), PATTERN)
    curves.window_loss[1] = curves.window_loss[1].flip(-1)
    bias = as_windows(router(2), torch.tensor([False, True]), curves, PATTERN).cell_bias
    assert torch.isfinite(bias).all() and bias.min() > -60


def test_a_head_that_averages_becomes_a_window_and_one_that_copies_does_not():
    settings = FitRecipe(
        model="m", output_dir="o", num_groups=TOPICS, group_dim=8, local_window=8, num_bands=5, steps=300
    )
    layer = fit_layer(averaging_window, range(6), range(10, 13), settings, seed=0)
    of_groups = layer.router.cell_bias[:, :-1].unflatten(-1, (TOPICS, -1)).std(dim=1).amax(dim=-1)
    assert float(of_groups[0]) > 0.1 and float(of_groups[1]) == 0
    part = layer.curves.before(LENGTH)
    pairs, loss = part.pairs[1, 0] / part.possible, part.loss[1, 0]
    at_windows = torch.stack([loss[(pairs - share).abs().argmin()] for share in part.window_pairs[0] / part.possible])
    torch.testing.assert_close(at_windows, part.window_loss[1, 0], rtol=0.6, atol=1e-3 * float(loss.max()))
