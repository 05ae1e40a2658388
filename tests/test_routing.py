"""Scores, Sinkhorn, memberships and balance."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from focus_hf import routing


def test_scores_are_the_formula_of_the_paper():
    torch.manual_seed(0)
    hidden, projection, centroids = torch.randn(2, 5, 12), torch.randn(3, 12), torch.randn(4, 3)
    scores = routing.group_scores(hidden, projection, centroids, temperature=0.1)
    for c in range(4):
        by_hand = (projection.double() @ hidden[1, 2].double()) @ centroids[c].double() / 0.1
        assert scores[1, 2, c].item() == pytest.approx(by_hand.item(), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_are_float32_also_under_autocast(dtype):
    hidden, projection, centroids = torch.randn(1, 4, 8).to(dtype), torch.randn(2, 8), torch.randn(3, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = routing.group_scores(hidden, projection, centroids, 0.1)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, routing.group_scores(hidden.float(), projection, centroids, 0.1))


@settings(max_examples=40, deadline=None)
@given(tokens=st.integers(32, 200), groups=st.integers(2, 8), spread=st.floats(0.1, 5), seed=st.integers(0, 10_000))
def test_sinkhorn_gives_distributions_of_equal_mass(tokens, groups, spread, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(1, tokens, groups, generator=generator, dtype=torch.float64) * spread
    scores += torch.randn(groups, generator=generator, dtype=torch.float64) * 3  # some groups start far ahead
    assignments, potentials = routing.sinkhorn(scores, iterations=200)
    torch.testing.assert_close(assignments.sum(-1), torch.ones(1, tokens, dtype=torch.float64))
    torch.testing.assert_close(
        assignments.mean(dim=(0, 1)), torch.full((groups,), 1 / groups, dtype=torch.float64), atol=0.01, rtol=0
    )
    torch.testing.assert_close(assignments, torch.softmax(scores + potentials, dim=-1))
    assert abs(potentials.mean().item()) < 1e-9


def test_more_sinkhorn_rounds_are_more_balanced():
    torch.manual_seed(0)
    scores = torch.randn(1, 500, 4) * 8 + torch.tensor([30.0, 0.0, -10.0, -20.0])
    largest = [routing.sinkhorn(scores, n)[0].mean(dim=(0, 1)).max().item() for n in (1, 3, 10)]
    assert largest[0] > largest[1] > largest[2]


def test_sinkhorn_balances_each_sequence_by_itself():
    """Sequences about different things may not crowd into groups of their own."""
    torch.manual_seed(0)
    scores = torch.randn(2, 200, 4, dtype=torch.float64)
    scores[0, :, :2] += 5.0
    scores[1, :, 2:] += 5.0
    assignments, potentials = routing.sinkhorn(scores, 50)
    torch.testing.assert_close(
        assignments.mean(dim=1), torch.full((2, 4), 0.25, dtype=torch.float64), atol=1e-3, rtol=0
    )
    for sequence in range(2):
        alone, own = routing.sinkhorn(scores[sequence], 50)
        torch.testing.assert_close(assignments[sequence], alone)
        torch.testing.assert_close(potentials[sequence], own)


@given(sequences=st.integers(1, 4), groups=st.integers(2, 6), seed=st.integers(0, 10_000))
@settings(deadline=None, max_examples=30)
def test_soft_assignments_have_inferences_value_and_sinkhorns_gradient(sequences, groups, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(sequences, 20, groups, generator=generator, dtype=torch.float64).requires_grad_()
    balance = torch.randn(groups, generator=generator, dtype=torch.float64)
    weights = torch.randn(sequences, 20, groups, generator=generator, dtype=torch.float64)
    assignments, potentials = routing.balanced_assignments(scores, balance, 30)
    assert torch.allclose(assignments, torch.softmax(scores + balance, -1))
    assert torch.equal(routing.hard_memberships(scores, balance, 1), assignments == assignments.amax(-1, keepdim=True))
    (gradient,) = torch.autograd.grad((assignments * weights).sum(), scores)
    # By the definition: how softmax moves with its argument, and its argument with the potentials.
    _, own = routing.sinkhorn(scores, 30)
    (through,) = torch.autograd.grad(
        (torch.softmax(scores + balance, -1).detach() * 0 + scores + own[:, None]).flatten(),
        scores,
        _softmax_backward(scores + balance, weights).flatten(),
    )
    assert torch.allclose(gradient, through)
    assert not potentials.requires_grad and potentials.shape == (sequences, 1, groups)
    first, own = routing.balanced_assignments(scores, torch.zeros_like(balance), 30)
    assert torch.allclose(first, routing.sinkhorn(scores, 30)[0])  # nothing to go by yet: Sinkhorn's own


def _softmax_backward(arguments, gradient):
    value = torch.softmax(arguments, -1)
    return (value * (gradient - (gradient * value).sum(-1, keepdim=True))).detach()


@given(sharpness=st.floats(0.3, 12), scale=st.floats(0.01, 100), seed=st.integers(0, 10_000))
@settings(deadline=None, max_examples=30)
def test_sharpened_scores_have_the_spread_asked_for_and_the_same_memberships(sharpness, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = scale * torch.randn(3, 40, 5, generator=generator, dtype=torch.float64)
    balance = scale * torch.randn(5, generator=generator, dtype=torch.float64)
    factor = routing.sharpening(scores, sharpness)
    sharpened = factor * scores
    between_groups = sharpened - sharpened.mean(dim=-1, keepdim=True)
    apart = (between_groups - between_groups.median(dim=1, keepdim=True).values).square().mean(dim=-1).sqrt()
    assert torch.allclose(apart.median(dim=-1).values, torch.full((3,), sharpness, dtype=torch.float64))
    # Some tokens far away from all others do not make the others undecided.
    far = scores.clone()
    far[:, ::5, 0] += 1e4 * scale
    assert (routing.sharpening(far, sharpness) > 0.3 * factor).all()
    same = routing.hard_memberships(sharpened, factor * balance, 2)
    assert torch.equal(same, routing.hard_memberships(scores, balance, 2))
    # A sequence's own affair: neither others in the batch nor padding nor an offset counts.
    valid = torch.arange(40).expand(3, 40) < 30
    padded = torch.where(valid[..., None], scores + 7 * scale, 1e3)
    torch.testing.assert_close(
        routing.sharpening(padded, sharpness, valid)[:1], routing.sharpening(scores[:1, :30], sharpness)
    )
    assert torch.equal(routing.sharpening(scores, None), torch.ones(3, 1, 1, dtype=torch.float64))


@pytest.mark.parametrize("top_k", [1, 2])
def test_balance_steps_even_out_hard_memberships(top_k):
    torch.manual_seed(0)
    scores = torch.randn(4, 300, 6) + torch.tensor([2.0, 0, 0, -1, 0, 0])
    balance = torch.zeros(6)
    before = routing.group_shares(routing.hard_memberships(scores, balance, top_k)).max()
    for _ in range(60):
        balance = balance + routing.balance_step(scores, balance, top_k)
    after = routing.group_shares(routing.hard_memberships(scores, balance, top_k)).max()
    assert before > 0.3 and after < 1.1 / 6
    assert abs(balance.mean()) < 1e-5


def test_a_balance_step_does_not_overshoot_where_most_tokens_are_undecided():
    """Most tokens lie close together, a few far away; steps in units of the spread would move all at once."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(1, 400, 4, generator=generator)
    scores[:, 40:] *= 0.02
    balance, largest = torch.tensor([1.0, 0.0, 0.0, 0.0]), []
    for _ in range(200):
        balance = balance + routing.balance_step(scores, balance, 1)
        largest.append(routing.group_shares(routing.hard_memberships(scores, balance, 1)).max().item())
    assert max(largest[100:]) < 0.35


def test_calibration_balances_tokens_that_lie_close_together_beside_a_few_far_away():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(4000, 6, generator=generator)
    scores[400:] *= 0.002
    for far in (1.0, -50.0):  # a group that holds all, or none, however far away it is
        balance = routing.calibrate_balance(scores, 1, torch.tensor([far, 0.0, 0.0, 0.0, 0.0, 0.0]))
        assert routing.group_shares(routing.hard_memberships(scores, balance, 1)).max() < 1.01 / 6


def test_a_balance_step_of_tokens_in_every_group_is_none():
    assert not routing.balance_step(torch.randn(2, 9, 3), torch.zeros(3), 3).any()


def test_balance_steps_of_processes_average_to_the_whole():
    torch.manual_seed(0)
    scores, balance = torch.randn(4, 50, 5), torch.randn(5)
    parts = torch.stack([routing.balance_step(part, balance, 2) for part in scores.chunk(2)])
    assert torch.allclose(parts.mean(0), routing.balance_step(scores, balance, 2), atol=1e-6)
    valid = torch.ones(4, 50, dtype=torch.bool)
    valid[0, 30:] = False
    disturbed = scores.clone()
    disturbed[0, 30:, 0] += 100.0
    alone = routing.balance_step(scores[:1, :30], balance, 1)
    assert torch.allclose(routing.balance_step(disturbed[:1], balance, 1, valid[:1]), alone, atol=1e-5)
    assert torch.allclose(routing.balance_step(scores[:1, :30], balance, 1, rate=0.1), alone / 2, atol=1e-6)
    assert routing.balance_step(disturbed[:1], balance, 1, torch.zeros_like(valid[:1])).isfinite().all()


def test_padding_takes_no_part_in_sinkhorn():
    torch.manual_seed(0)
    scores = torch.randn(2, 40, 4) * 3
    valid = torch.ones(2, 40, dtype=torch.bool)
    valid[0, 30:] = False
    disturbed = scores.clone()
    disturbed[0, 30:] = 100.0
    first, b1 = routing.sinkhorn(scores, 10, valid)
    second, b2 = routing.sinkhorn(disturbed, 10, valid)
    torch.testing.assert_close(b1, b2)
    torch.testing.assert_close(first[valid], second[valid])
    alone, own = routing.sinkhorn(scores[0, :30], 10)
    torch.testing.assert_close(first[0, :30], alone)
    torch.testing.assert_close(b1[0], own)


@settings(max_examples=50, deadline=None)
@given(groups=st.integers(1, 9), seed=st.integers(0, 10_000), data=st.data())
def test_hard_memberships_are_the_top_k_of_score_plus_balance(groups, seed, data):
    top_k = data.draw(st.integers(1, groups))
    generator = torch.Generator().manual_seed(seed)
    scores, balance = torch.randn(2, 7, groups, generator=generator), torch.randn(groups, generator=generator)
    memberships = routing.hard_memberships(scores, balance, top_k)
    assert memberships.dtype == torch.bool
    for token, members in zip((scores + balance).reshape(-1, groups), memberships.reshape(-1, groups), strict=True):
        expected = sorted(range(groups), key=lambda c: -token[c].item())[:top_k]
        assert sorted(members.nonzero().flatten().tolist()) == sorted(expected)


def test_straight_through_has_hard_values_and_soft_gradients():
    soft = torch.softmax(torch.randn(5, 3, requires_grad=True), -1)
    soft.retain_grad()
    hard = torch.tensor([[True, False, False]] * 5)
    weights = torch.randn(5, 3)
    mixed = routing.straight_through(hard, soft)
    assert torch.equal(mixed.detach().round(), hard.float())
    (mixed * weights).sum().backward()
    torch.testing.assert_close(soft.grad, weights)


@settings(max_examples=25, deadline=None)
@given(groups=st.integers(2, 12), skew=st.floats(0, 20), seed=st.integers(0, 10_000), data=st.data())
def test_calibration_balances_hard_memberships(groups, skew, seed, data):
    top_k = data.draw(st.integers(1, max(1, groups // 2)))
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(2000, groups, generator=generator) * 3 + torch.randn(groups, generator=generator) * skew
    balance = routing.calibrate_balance(scores, top_k)
    shares = routing.group_shares(routing.hard_memberships(scores, balance, top_k))
    assert shares.max().item() <= 1.01 / groups
    assert shares.min().item() >= 0.95 / groups


def test_group_shares_ignores_padding():
    memberships = torch.tensor([[[True, False], [True, False], [False, True]]])
    assert routing.group_shares(memberships).tolist() == pytest.approx([2 / 3, 1 / 3])
    assert routing.group_shares(memberships, torch.tensor([[True, False, True]])).tolist() == [0.5, 0.5]
