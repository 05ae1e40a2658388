"""Windows with copies, and the gradient that stands for recalling from them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from focus_hf.adapter.model import find_targets
from focus_hf.fit.capture import capture
from focus_hf.fit.recall import slope_of_recall, with_copies
from focus_hf.fit.store import read
from tests.families import base_model, focus_config, token_ids


@settings(deadline=None, max_examples=60)
@given(length=st.integers(16, 2000), seed=st.integers(0, 99))
def test_copies_are_of_what_stands_before_them(length, seed):
    ids = torch.arange(length) * 7
    window, copied = with_copies(ids, torch.Generator().manual_seed(seed))
    assert torch.equal(window[~copied], ids[~copied]) and copied.any()
    assert not copied[: length // 4].any()
    for place in copied.nonzero()[:, 0].tolist():
        assert window[place] in window[:place]
    follows = window[1:][copied[1:]] - window[:-1][copied[1:]] == 7  # tokens of a span stand in their order
    stretches = -(-(length - length // 4) // min(256, length // 4))
    assert int((~follows).sum()) <= 2 * stretches


def test_the_slope_is_that_of_log_odds():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 9, generator=generator, dtype=torch.float64).requires_grad_()
    ids = torch.randint(9, (12,), generator=generator)
    copied = torch.zeros(12, dtype=torch.bool)
    copied[[3, 5, 6, 9]] = True
    with torch.no_grad():
        for place in (2, 5, 8):  # 3, 6 and 9 are recalled; 5 is not
            logits[place, ids[place + 1]] += 20.0
        logits[4, ids[5]] = -20.0
    slope = slope_of_recall(logits.detach(), ids, copied, torch.Generator().manual_seed(4))
    signs = torch.randint(2, (3, 1), generator=torch.Generator().manual_seed(4))[:, 0] * 2 - 1
    probability = logits.softmax(dim=-1)
    right = torch.stack([probability[place, ids[place + 1]] for place in (2, 5, 8)])
    wanted = (signs * torch.log(right / (1 - right))).sum() * math.sqrt(12 / 3)
    expected = torch.autograd.grad(wanted, logits)[0]
    torch.testing.assert_close(slope, expected, rtol=1e-5, atol=1e-7)
    assert slope[[2, 5, 8]].abs().amax(dim=-1).min() > 1.9  # sure as the model is


def test_what_is_not_recalled_has_no_slope():
    logits, ids = torch.randn(6, 5), torch.zeros(6, dtype=torch.long)
    logits[:, 0] = -9.0
    slope = slope_of_recall(logits, ids, torch.ones(6, dtype=torch.bool), torch.Generator())
    assert not slope.any()


@pytest.mark.parametrize("copied", [None, torch.arange(40) > 30])
def test_a_window_with_copies_is_captured_with_the_gradient_of_recall(copied, tmp_path):
    model, ids = base_model("llama"), token_ids(1, 40)[0]
    layers = {module.layer_idx: module for module in find_targets(model, focus_config()).values()}
    capture(model, layers, {7: ids}, tmp_path, rows=40, seed=3, copied={} if copied is None else {7: copied})
    first = read(tmp_path, 7, min(layers)).gradients
    capture(model, layers, {7: ids}, tmp_path, rows=40, seed=3)
    assert torch.equal(first, read(tmp_path, 7, min(layers)).gradients) == (copied is None)
