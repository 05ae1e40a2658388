"""The studies behind docs/results.md run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from focus_hf import routing

STUDIES = Path(__file__).parents[2] / "studies"


@pytest.mark.slow
def test_every_variant_of_the_recipe_study(tiny, tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            STUDIES / "recipes.py",
            *("--model", tiny / "base", "--train-file", tiny / "train.txt", "--eval-file", tiny / "held_out.txt"),
            *("--out", tmp_path, "--steps", "2", "--seq-len", "64", "--local-window", "8", "--eval-windows", "4"),
            "--dominance",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("| softmax-and-balance-loss")]
    assert len(rows) == 2


def test_the_balance_loss_pushes_crowded_groups_apart():
    sys.path.insert(0, str(STUDIES))
    try:
        import recipes
    finally:
        sys.path.pop(0)
    scores = torch.randn(2, 30, 4, generator=torch.Generator().manual_seed(0))
    scores[..., 0] += 2.0
    scores.requires_grad_()
    assignments, _ = recipes.balance_loss(scores, 10)
    (assignments * 0).sum().backward()
    expected_scores = scores.detach().clone().requires_grad_()
    probabilities = expected_scores.softmax(-1)
    shares = torch.nn.functional.one_hot(probabilities.argmax(-1), 4).float().mean((0, 1))
    (0.01 * 4 * (shares * probabilities.mean((0, 1))).sum()).backward()
    torch.testing.assert_close(scores.grad, expected_scores.grad)
    with recipes.balanced_as("softmax"):
        assert routing.sinkhorn is recipes.plain_softmax
    assert routing.sinkhorn is recipes.SINKHORN
