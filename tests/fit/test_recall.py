"""Windows that repeat themselves, and what is looked at in them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from focus_hf.adapter.targets import find_targets
from focus_hf.fit.capture import capture
from focus_hf.fit.recall import SPAN, STRETCH, near_copies, slope_of_recall, with_copies
from focus_hf.fit.store import read
from tests.families import base_model, focus_config, token_ids


@given(length=st.integers(1, 3000), seed=st.integers(0, 99))
def test_copies_are_spans_of_what_stands_before_them(length, seed):
    ids = torch.arange(length)
    found, copied = with_copies(ids, torch.Generator().manual_seed(seed))
    assert torch.equal(ids, torch.arange(length)) and torch.equal(found[~copied], ids[~copied])
    assert not copied[: length // 4].any() and bool((found <= ids).all())
    if length < 4 * STRETCH:
        return
    assert copied.sum() % SPAN == 0
    for first in copied.nonzero().flatten()[::SPAN].tolist():
        before = found[:first].unfold(0, SPAN, 1)
        assert (before == found[first : first + SPAN]).all(dim=1).any()
    assert float(copied[length // 4 :].float().mean()) == pytest.approx(SPAN / STRETCH, rel=0.3)


def test_queries_are_those_that_read_or_predict_a_copy():
    copied = torch.tensor([False, False, True, True, False, False, True])
    assert near_copies(copied).tolist() == [1, 2, 3, 5]  # the last token predicts nothing
    assert near_copies(torch.zeros(3, dtype=torch.bool)).tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slopes_are_the_gradient_of_the_log_odds_of_recalled_tokens(dtype):
    """Recalled: copied, and the model's first choice; whether it is sure does not matter."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(400, 11, generator=generator).to(dtype)
    ids = torch.randint(11, (400,), generator=generator)
    copied = torch.rand(400, generator=generator) < 0.5
    recalled = copied[1:] & (logits[:-1].argmax(dim=-1) == ids[1:])
    leaf = logits.double().requires_grad_()
    shares = leaf.softmax(dim=-1)[:-1].gather(1, ids[1:, None])[:, 0]
    (expected,) = torch.autograd.grad((shares / (1 - shares)).log()[recalled].sum(), leaf)
    found = slope_of_recall(logits.clone(), ids, copied, generator)
    assert found.dtype == dtype
    signs = found[:-1].gather(1, ids[1:, None]).sign().double()
    torch.testing.assert_close(
        found[:-1].double() * signs, expected[:-1], rtol=0, atol=1e-2 if dtype.itemsize < 4 else 1e-6
    )
    assert (
        set(signs[recalled].flatten().tolist()) == {-1.0, 1.0} and not found[-1].any() and not signs[~recalled].any()
    )


def test_it_does_not_vanish_where_a_model_is_sure():
    logits = torch.zeros(3, 9)
    logits[1, 4] = 40.0
    slope = slope_of_recall(logits, torch.tensor([3, 1, 4]), torch.tensor([False, False, True]), torch.Generator())
    assert slope[1].abs().max() == 1


def test_a_window_of_recall_is_captured_with_its_copies(tmp_path):
    model = base_model("llama")
    layers = {module.layer_idx: module for module in find_targets(model, focus_config()).values()}
    ids = token_ids(1, 96)[0]
    capture(model, layers, {0: ids, 1: ids}, tmp_path, rows=24, seed=5, recall={1})
    plain, recalling = read(tmp_path, 0, 0), read(tmp_path, 1, 0)
    generator = torch.Generator().manual_seed(5 * 1_000_003 + 1)
    found, copied = with_copies(ids, generator)
    assert set(recalling.positions.tolist()) <= set(near_copies(copied).tolist()) and len(recalling.positions) > 12
    same = (plain.plain_keys - recalling.plain_keys).abs().amax(dim=(0, 2)) < 1e-3
    assert torch.equal(same, found == ids)
