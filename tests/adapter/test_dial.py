"""From a share of pairs to the threshold of each query."""

from __future__ import annotations

import math

import pytest
import torch

from focus_hf.adapter.config import FocusConfig
from focus_hf.adapter.dial import limits, limits_from, share_at, threshold_for, thresholds

#: Thresholds and the shares under them, at positions.
CURVES = {"64": [[-3.0, 0.1], [-6.0, 0.5], [-9.0, 0.9]], "65536": [[-8.0, 0.05], [-12.0, 0.2], [-16.0, 0.8]]}


def settings(pairs: float | None) -> FocusConfig:
    return FocusConfig(
        routing="cells", num_groups=4, num_bands=4, local_window=8, pairs=pairs, pairs_curves=CURVES, threshold=-7.0
    )


def by_hand(position: int, share: float) -> float:
    """Straight lines: over the share at each curve's position, and over the position's logarithm between the two."""

    def at(curve: list[list[float]]) -> float:
        points = [(s, t) for t, s in curve]
        if share <= points[0][0]:
            return points[0][1]
        for (s0, t0), (s1, t1) in zip(points, points[1:], strict=False):
            if share <= s1:
                return t0 + (t1 - t0) * (share - s0) / (s1 - s0)
        return points[-1][1]

    place = math.log2(max(position, 1))
    between = min(max((place - 6) / (16 - 6), 0.0), 1.0)
    beyond = max(place - 16 - math.log2(4 / 3), 0.0) / (16 - 6)
    return at(CURVES["64"]) + (between + beyond) * (at(CURVES["65536"]) - at(CURVES["64"]))


@pytest.mark.parametrize("share", [0.03, 0.15, 0.3, 0.95])
def test_a_threshold_is_read_off_the_curves(share: float) -> None:
    positions = [-5, 0, 1, 63, 64, 65, 1000, 9000, 65_535, 65_536, 87_000, 10**6, 2**29]
    found = thresholds(settings(share), torch.tensor([positions]))
    assert found[0].tolist() == pytest.approx([by_hand(position, share) for position in positions], abs=1e-5)


def test_a_token_has_the_threshold_that_it_has_in_a_prompt() -> None:
    chosen, positions = settings(0.15), torch.arange(40_000)[None]
    whole, bands = thresholds(chosen, positions), limits(chosen, positions)
    assert isinstance(whole, torch.Tensor)
    for position in (0, 1, 63, 64, 5000, 8191, 8192, 39_999):
        assert torch.equal(thresholds(chosen, positions[:, position : position + 1]), whole[:, position, None])
        assert torch.equal(limits_from(chosen, position, 1, torch.device("cpu"))[0, 0], bands[0, position])
    assert torch.equal(limits_from(chosen, 5000, 100, torch.device("cpu")), bands[:, 5000:5100])


def test_a_compiled_call_has_the_same_thresholds() -> None:
    chosen, compiled = settings(0.15), torch.compile(thresholds, backend="eager", fullgraph=True)
    for position in (100, 9000, 30_000):
        asked = torch.tensor([[position]])
        assert torch.equal(compiled(chosen, asked), thresholds(chosen, asked))


def test_all_and_none() -> None:
    assert thresholds(settings(None), torch.arange(4)[None]) == -7.0
    assert thresholds(settings(1.0), torch.arange(4)[None]) < -1e5


def test_thresholds_do_not_rise_beyond_the_last_curve() -> None:
    rising = {"64": [[-9.0, 0.1], [-12.0, 0.9]], "128": [[-3.0, 0.1], [-6.0, 0.9]]}
    chosen = FocusConfig(routing="cells", num_groups=4, num_bands=4, pairs=0.3, pairs_curves=rising)
    assert thresholds(chosen, torch.tensor([[128, 171, 10**6]])).unique().numel() == 1
    assert share_at({"64": rising["64"]}, 10**6, -10.0) == pytest.approx(share_at({"64": rising["64"]}, 64, -10.0))


@pytest.mark.parametrize("length", [60_000, 300_000, 10**7])
@pytest.mark.parametrize("share", [0.1, 0.3])
def test_one_threshold_for_all_gives_the_share_that_each_its_own_gives(length: int, share: float) -> None:
    """Of a context as a whole, where curves are straight; beyond the curves, too."""
    threshold = threshold_for(CURVES, length, share)
    assert share_at(CURVES, length, threshold) == pytest.approx(share, abs=1e-4)
    own = thresholds(settings(share), torch.tensor([[1, length]]))
    assert isinstance(own, torch.Tensor)
    assert own[0, 1] < threshold < own[0, 0]
