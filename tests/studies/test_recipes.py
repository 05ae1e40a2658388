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
@pytest.mark.timeout(1200)  # some twenty trainings, each in a few seconds on an idle machine
def test_every_variant_of_the_recipe_study(tiny, tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            STUDIES / "recipes.py",
            *("--model", tiny / "base", "--train-file", tiny / "train.txt", "--eval-file", tiny / "held_out.txt"),
            *("--out", tmp_path, "--steps", "2", "--seq-len", "272", "--local-window", "8", "--eval-windows", "2"),
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
    assignments, _ = recipes.balance_loss(scores, torch.zeros(4), 10)
    (assignments * 0).sum().backward()
    expected_scores = scores.detach().clone().requires_grad_()
    probabilities = expected_scores.softmax(-1)
    shares = torch.nn.functional.one_hot(probabilities.argmax(-1), 4).float().mean((0, 1))
    (0.01 * 4 * (shares * probabilities.mean((0, 1))).sum()).backward()
    torch.testing.assert_close(scores.grad, expected_scores.grad)
    ours = routing.balanced_assignments, routing.balance_step
    with recipes.balanced_as("softmax"):
        assert (routing.balanced_assignments, routing.balance_step) == (recipes.plain_softmax, recipes.no_step)
    assert (routing.balanced_assignments, routing.balance_step) == ours


@pytest.mark.parametrize("name", ["over_batch", "own_potentials", "no_gradient"])
def test_variants_of_balancing_differ_in_what_they_say(name):
    sys.path.insert(0, str(STUDIES))
    try:
        import recipes
    finally:
        sys.path.pop(0)
    torch.manual_seed(0)
    scores, balance = torch.randn(2, 30, 4, requires_grad=True), torch.randn(4)
    weights = torch.randn(2, 30, 4)

    def of(function):
        assignments, potentials = function(scores, balance, 10)
        assert potentials.shape == (2, 1, 4) and not potentials.requires_grad
        return assignments, torch.autograd.grad((assignments * weights).sum(), scores)[0]

    value, gradient = of(getattr(recipes, name))
    ours, our_gradient = of(routing.balanced_assignments)
    assert torch.allclose(value, ours) == (name != "own_potentials")
    assert not torch.allclose(gradient, our_gradient)
