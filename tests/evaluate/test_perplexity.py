"""Perplexities, modes and pairs against plain cross-entropy and the definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from focus_hf.adapter import focus_layers, routing_mode, set_routing
from focus_hf.attention import Pattern
from focus_hf.evaluate import (
    EvaluationPlan,
    Mode,
    SlidingWindows,
    TokenText,
    attended_share,
    attending,
    evaluate,
    far_copies,
    list_modes,
    measure_quality,
    perplexity,
    position_curve,
    position_figure,
    quality_figure,
    quality_table,
    token_losses,
)
from focus_hf.evaluate.perplexity import LIKELIEST, Divergence
from tests.families import base_model, focus_model, logits, pairs_of, token_ids


def test_perplexity_is_what_cross_entropy_says():
    model, windows = focus_model("llama"), token_ids(batch=5, length=30)
    losses = torch.nn.functional.cross_entropy(
        logits(model, windows)[:, :-1].transpose(1, 2), windows[:, 1:], reduction="none"
    )
    assert perplexity(model, windows, batch_size=2) == pytest.approx(math.exp(losses.mean().item()), rel=1e-5)
    with pytest.raises(ValueError, match=r"got \(0, 30\)"):
        perplexity(model, windows[:0])


def test_quality_table_measures_each_mode_and_leaves_the_model_as_it_was(tmp_path):
    model, windows = focus_model("llama", top_k=2), token_ids(batch=3, length=40)
    rows = list(quality_table(model, windows, [1, 4]))
    modes = ["dense", "local", "hard", "window", "hard", "window"]
    assert [(row.mode, row.top_k) for row in rows] == list(zip(modes, [None, None, 1, 1, 4, 4], strict=True))
    assert focus_layers(model)[0].configs["default"].top_k == 2 and focus_layers(model)[0].mode is None
    dense, local, hard, window, everything, wide = rows
    assert window.pairs == pytest.approx(hard.pairs, rel=0.2) and wide.pairs == 1.0  # a window is whole tokens
    assert dense.perplexity == pytest.approx(perplexity(base_model("llama"), windows), rel=1e-6)
    assert everything.perplexity == pytest.approx(dense.perplexity, rel=1e-4) and everything.pairs == 1.0
    assert local.pairs < hard.pairs < 1.0
    nobody = torch.zeros(1, 40, 4, dtype=torch.bool)
    attended, possible = pairs_of(Pattern(8, 2), nobody)
    assert local.pairs == pytest.approx(attended / possible)
    with routing_mode(model, "local"):
        assert perplexity(model, windows) == pytest.approx(local.perplexity)
    figure = quality_figure(rows, tmp_path / "sub" / "quality.png")
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_attended_share_needs_an_active_adapter():
    model = focus_model("llama")
    with model.disable_adapter(), pytest.raises(ValueError, match="not active"):
        attended_share(model, token_ids())


@pytest.mark.parametrize(("length", "stride"), [(30, 30), (30, 10), (30, 1), (30, 29)])
def test_sliding_windows_predict_each_token_once(length, stride):
    """Token ``t``'s loss is that of a model that sees the window it is scored in, and no token is scored twice."""
    model, ids = base_model("llama"), token_ids(batch=1, length=100)[0]
    text = SlidingWindows.of(ids, length, stride)
    losses = token_losses(model, text.windows)
    scored = []
    for window, (row, counts) in enumerate(zip(losses, text.scored, strict=True)):
        for column in counts.nonzero().flatten().tolist():
            scored.append(window * stride + column + 1)
            assert window == 0 or stride == length or column + 1 >= length - stride
        window_ids = ids[window * stride : window * stride + length][None]
        expected = torch.nn.functional.cross_entropy(
            logits(model, window_ids)[0, :-1], window_ids[0, 1:], reduction="none"
        )
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-5)
    assert len(scored) == len(set(scored))
    last = (len(text.windows) - 1) * stride + length - 1
    unpredicted = {window * length for window in range(len(text.windows))} if stride == length else {0}
    assert set(scored) == set(range(last + 1)) - unpredicted
    expected = math.exp(losses[text.scored].mean().item())
    assert text.perplexity(losses) == pytest.approx(expected, rel=1e-5)


def test_copies_are_tokens_seen_before_out_of_the_window():
    """Against the definition, spelled out for every token."""
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(0, 6, (3, 60), generator=generator)  # six tokens: bigrams come again and again
    for local_window in (0, 5, 20):
        found = far_copies(windows, local_window)
        for row, ids in enumerate(windows.tolist()):
            for place in range(1, 60):
                earlier = [s for s in range(1, place) if ids[s - 1 : s + 1] == ids[place - 1 : place + 1]]
                expected = bool(earlier) and all(place - 1 - s > local_window for s in earlier)
                assert bool(found[row, place - 1]) == expected, (local_window, row, place)
        assert found.any() and not found.all()


def test_copies_and_the_rest_make_up_the_loss():
    model, windows = focus_model("llama"), token_ids(batch=1, length=120)
    windows[0, 60:90] = windows[0, 10:40]
    text = SlidingWindows.of(windows[0], 120, 120)
    copied = text.copies(8)
    assert copied[0, 60:89].all() and copied.sum() < 40
    rows = list(measure_quality(model, text, list_modes(["dense", "hard"], [1])))
    for row in rows:
        count = int(copied.sum())
        whole = (row.copies * count + row.rest * (119 - count)) / 119
        assert math.exp(whole) == pytest.approx(row.perplexity, rel=1e-6)
    losses = token_losses(base_model("llama"), windows)
    assert rows[0].copies == pytest.approx(losses[copied].mean().item(), rel=1e-5)
    results = evaluate(model, [TokenText(windows[0], "text")], EvaluationPlan(seq_lens=[120], modes=["dense"]))
    assert results.evaluations[0].copies == int(copied.sum())
    (row,) = measure_quality(model, SlidingWindows.of(windows[0, :20], 20, 20), [Mode("dense")])
    assert row.copies is None and row.rest == pytest.approx(math.log(row.perplexity))


def test_divergence_is_from_dense_attention(monkeypatch):
    """Of the whole model, beside its own logits; each text by itself, and only where dense attention was measured."""
    monkeypatch.setitem(token_losses.__globals__, "_ROWS", 16)  # several stretches a window
    model, windows = focus_model("llama"), token_ids(batch=3, length=60)
    text = SlidingWindows(windows, torch.rand(3, 59, generator=torch.Generator().manual_seed(0)) < 0.5)
    rows = list(measure_quality(model, text, list_modes(["dense", "hard", "local"], [1]), batch_size=2))
    with attending(model, Mode("hard")):
        focus = logits(model, windows)[:, :-1].double().log_softmax(-1)
    dense = logits(base_model("llama"), windows)[:, :-1].double().log_softmax(-1)
    expected = (dense.exp() * (dense - focus)).sum(-1)[text.scored].mean().item()
    found = {row.mode: row.divergence for row in rows}
    assert found["dense"] == 0
    assert found["hard"] == pytest.approx(expected, rel=1e-3) and found["local"] > 0 and expected > 1e-6
    assert [row.divergence for row in measure_quality(model, text, [Mode("hard")])] == [None]


@settings(max_examples=30, deadline=None)
@given(vocabulary=st.integers(2, 2000), spread=st.floats(0, 30), seed=st.integers(0, 100))
def test_divergence_of_many_tokens_is_a_close_bound(vocabulary, spread, seed):
    one, two = torch.randn(2, 5, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread
    two = one + 0.1 * two
    p, q = (logits.double().log_softmax(-1) for logits in (one, two))
    divergence = Divergence()
    for predicted in (p, q, p):  # in two stretches
        divergence.look(0, predicted[:3].float())
        divergence.look(1, predicted[3:].float())
    assert divergence.mean(torch.ones(1, 5, dtype=torch.bool)) == 0
    divergence.look(0, q[:3].float())
    divergence.look(1, q[3:].float())
    whole = (p.exp() * (p - q)).sum(-1).mean().item()
    found = divergence.mean(torch.ones(1, 5, dtype=torch.bool))
    assert found <= whole * (1 + 1e-3) + 1e-5
    if vocabulary <= LIKELIEST:
        assert found == pytest.approx(whole, rel=1e-3, abs=1e-5)


def test_sliding_windows_say_what_is_wrong():
    ids = torch.arange(10)
    with pytest.raises(ValueError, match="The text has 10 tokens, fewer than one window of 11"):
        SlidingWindows.of(ids, 11, 1)
    for stride in (0, 6):
        with pytest.raises(ValueError, match=r"stride must be from 1 to the window's length \(5\)"):
            SlidingWindows.of(ids, 5, stride)


def test_position_curve_covers_every_position_once():
    losses = torch.arange(10.0).expand(3, 10)
    curve = position_curve(losses, buckets=4)
    assert [(stretch["first"], stretch["last"]) for stretch in curve] == [(1, 3), (4, 6), (7, 8), (9, 10)]
    assert [stretch["loss"] for stretch in curve] == [1.0, 4.0, 6.5, 8.5]
    assert len(position_curve(losses[:, :2], buckets=4)) == 2


def test_modes_are_what_they_say_and_leave_no_trace():
    model, windows = focus_model("llama", top_k=3, gate="additive").train(), token_ids(batch=2, length=60)
    modes = list_modes(["dense", "local", "soft", "hard"], [1, 2])
    measured = {mode: perplexity_in(model, mode, windows) for mode in modes}
    assert model.training and focus_layers(model)[0].mode is None
    assert focus_layers(model)[0].routing_config.top_k == 3
    model.eval()
    with model.disable_adapter():
        assert measured[Mode("dense")] == perplexity(model, windows)
    for mode in ("soft", "local"):
        with routing_mode(model, mode):
            assert measured[Mode(mode)] == perplexity(model, windows)
    set_routing(model, top_k=2)
    assert measured[Mode("hard", 2)] == perplexity(model, windows)
    assert len(set(measured.values())) == 5
    with pytest.raises(ValueError, match="window, random, quest, .*, oracle-gqa, got 'fast'"):
        list_modes(["fast"], [1])


def test_an_adapter_of_the_hard_gate_has_no_soft_attention():
    model = focus_model("llama")
    text = TokenText(token_ids(batch=1, length=200)[0], "text")
    with pytest.warns(UserWarning, match="trained through hard attention"):
        results = evaluate(model, [text], EvaluationPlan(seq_lens=[60], modes=["dense", "soft", "hard"]))
    assert [row["mode"] for row in results.evaluations[0].rows] == ["dense", "hard"]


def perplexity_in(model, mode, windows):
    with attending(model, mode):
        return perplexity(model, windows)


def test_pairs_count_the_dense_start():
    model, windows = focus_model("llama", dense_below=20), token_ids(batch=1, length=60)
    seen = []
    for layer in focus_layers(model):
        layer.observer = lambda _, scores, memberships: seen.append(memberships)
    logits(model, windows)
    for layer in focus_layers(model):
        layer.observer = None
    pairs = [pairs_of(Pattern(8, 2, 20), memberships) for memberships in seen]
    expected = sum(attended for attended, _ in pairs) / sum(possible for _, possible in pairs)
    assert attended_share(model, windows) == pytest.approx(expected)


def test_figures_of_positions(tmp_path):
    model, windows = focus_model("llama"), token_ids(batch=2, length=60)
    text = SlidingWindows.of(windows.flatten(), 60, 60)
    rows = list(measure_quality(model, text, list_modes(["dense", "hard"], [1])))
    assert rows[0].positions[0]["first"] == 1 and rows[0].positions[-1]["last"] == 59
    assert position_figure(rows, tmp_path / "positions.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="measure the mode 'dense' too"):
        position_figure(rows[1:], tmp_path / "no.png")
    assert [path.name for path in tmp_path.iterdir()] == ["positions.png"]
