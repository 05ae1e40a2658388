"""What costs the same as Focus: windows of as many pairs, random groups, groups by token, and how rows compare."""

from __future__ import annotations

import math

import pytest
import torch

from focus_hf.adapter import focus_layers, observe_routing, routing_mode, set_routing
from focus_hf.attention import Pattern, count_pairs
from focus_hf.evaluate import (
    Mode,
    SlidingWindows,
    attended_share,
    attending,
    list_modes,
    measure_quality,
    token_losses,
)
from focus_hf.evaluate.opponents import balanced_tokens, equal_window
from focus_hf.evaluate.perplexity import paired_excess
from tests.families import GROUPS, SINKS, WINDOW, base_model, focus_model, logits, token_ids

HEADS = {"0.0": {"attend": "window"}, "0.1": {"attend": "everything"}, "1.0": {"attend": "groups", "top_k": 3}}
ADAPTERS = [{}, {"head_patterns": HEADS}, {"routing": "per_head"}]


def window_mask(length, width):
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    return (j <= i) & ((i - j <= width) | (j < SINKS))


@pytest.mark.parametrize("pairs", [0.0, 0.2, 0.5, 0.99, 1.0])
def test_a_window_of_as_many_pairs_is_the_narrowest(pairs):
    length = 60
    width = equal_window(focus_layers(focus_model("llama"))[0].routing_config, length, pairs)
    shares = [window_mask(length, w).sum().item() / (length * (length + 1) / 2) for w in range(length)]
    assert width == next(w for w, share in enumerate(shares) if share >= pairs)


@pytest.mark.parametrize("changes", ADAPTERS)
def test_a_window_is_the_base_models_attention_under_that_mask(changes):
    """Against the base model with an explicit mask; with a cache too."""
    model, ids = focus_model("llama", **changes), token_ids(batch=1, length=50)
    expected = logits(base_model("llama"), ids, attention_mask=window_mask(50, 17)[None, None])
    with routing_mode(model, "window", 17), torch.no_grad():
        torch.testing.assert_close(logits(model, ids), expected, rtol=1e-4, atol=1e-4)
        start = model(input_ids=ids[:, :40], use_cache=True)
        rest = model(input_ids=ids[:, 40:], past_key_values=start.past_key_values).logits
        torch.testing.assert_close(rest, expected[:, 40:], rtol=1e-4, atol=1e-4)
        share, counted = attended_share(model, ids), count_pairs(Pattern(17, SINKS), torch.zeros(1, 50, 0).bool())
        assert share == pytest.approx(counted[0] / counted[1])
    assert focus_layers(model)[0].mode is None and focus_layers(model)[0].window is None


def test_a_window_has_a_width_and_nothing_else_has_one():
    model = focus_model("llama")
    for wrong in ({"mode": "window"}, {"mode": "window", "window": -1}, {"mode": "hard", "window": 3}, {"window": 3}):
        with pytest.raises(ValueError, match='mode="window" takes window'):
            set_routing(model, **wrong)


@pytest.mark.parametrize("name", ["random", "tokens"])
@pytest.mark.parametrize("changes", ADAPTERS)
def test_opponents_by_groups_decode_as_they_prefill_and_leave_no_trace(name, changes):
    model, ids = focus_model("llama", **changes), token_ids(batch=2, length=50)
    before = logits(model, ids)
    with attending(model, Mode(name, 1), ids):
        whole = logits(model, ids)
        with torch.no_grad():
            start = model(input_ids=ids[:, :40], use_cache=True)
            rest = model(input_ids=ids[:, 40:], past_key_values=start.past_key_values).logits
    torch.testing.assert_close(rest, whole[:, 40:], rtol=1e-4, atol=1e-4)
    assert not torch.equal(whole, before) and torch.equal(logits(model, ids), before)


def test_heads_keep_their_patterns_at_the_adapters_own_top_k():
    model, ids = focus_model("llama", head_patterns=HEADS), token_ids(batch=1, length=50)
    before = logits(model, ids)
    with attending(model, Mode("hard", 1)):
        assert torch.equal(logits(model, ids), before)
    with attending(model, Mode("hard", 2)):
        assert not torch.equal(logits(model, ids), before)
    assert focus_layers(model)[0].routing_config.head_patterns == HEADS and torch.equal(logits(model, ids), before)


def groups_of(model, mode, ids):
    seen = {}
    with attending(model, mode, ids), observe_routing(model, lambda layer, _, members: seen.update({layer: members})):
        logits(model, ids)
    return list(seen.values())


def test_groups_by_token_are_the_same_wherever_it_stands_and_hold_as_many_tokens():
    model = focus_model("llama")
    ids = torch.cat([token_ids(batch=1, length=100), torch.full((1, 20), 7)], dim=1)  # one token is frequent
    for members in groups_of(model, Mode("tokens", 1), ids):
        for token in ids.unique():
            assert (members[ids == token] == members[ids == token][0]).all()
        assert members.sum(dim=1).max() - members.sum(dim=1).min() <= 3
    assert balanced_tokens(99, GROUPS, None).argmax(dim=-1).bincount(minlength=GROUPS).min() > 10


def test_random_groups_are_even_and_differ_between_layers():
    first, second, *_ = groups_of(focus_model("llama"), Mode("random", 2), token_ids(batch=2, length=200))
    assert torch.equal(first[0], first[1]) and not torch.equal(first, second)
    assert (first.sum(dim=-1) == 2).all()
    shares = first.float().mean(dim=(0, 1))
    assert (shares - 2 / GROUPS).abs().max() < 0.12


def test_every_row_of_focus_has_its_opponents_at_equal_pairs_beside_it():
    model, windows = focus_model("llama"), token_ids(batch=4, length=80)
    text = SlidingWindows.of(windows.flatten(), 80, 80)
    rows = list(measure_quality(model, text, list_modes(["hard", "window", "random", "dense", "tokens"], [1, 2])))
    names = ["hard", "window", "random", "tokens"]
    assert [(r.mode, r.top_k) for r in rows] == [("dense", None), *((n, k) for k in (1, 2) for n in names)]
    for top_k in (1, 2):
        focus, window, drawn, tokens = (r for r in rows if r.top_k == top_k)
        assert focus.pairs <= window.pairs < focus.pairs + 1 / 40 and window.width > WINDOW
        assert abs(drawn.pairs - focus.pairs) < 0.25 and abs(tokens.pairs - focus.pairs) < 0.25
        with routing_mode(model, "window", window.width):
            losses = token_losses(model, windows)
        assert window.perplexity == pytest.approx(math.exp(losses.mean().item()), rel=1e-5)
        assert window.excess == pytest.approx(math.log(window.perplexity / rows[0].perplexity), abs=1e-6)
        each = (losses - token_losses(base_model("llama"), windows)).mean(dim=1)
        assert window.stderr == pytest.approx((each.var() / 4).sqrt().item(), rel=1e-3)
    assert rows[0].excess == 0.0 and str(rows[2]) == f"window of {rows[2].width} and sinks, pairs of top_k=1"


def test_a_paired_error_is_that_of_the_differences():
    dense = torch.randn(6, 9) * 10
    mean, stderr = paired_excess(dense + 0.5, dense, torch.ones(6, 9, dtype=torch.bool))
    assert mean == pytest.approx(0.5, abs=1e-5) and stderr < 1e-5
    assert paired_excess(dense[:1], dense[:1], torch.ones(1, 9, dtype=torch.bool)) == (0.0, None)
