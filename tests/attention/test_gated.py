"""The gates of training against their formulas, and their relation to the hard mask."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from focus_hf.attention import (
    PADDING,
    Pattern,
    Problem,
    Scores,
    gated_attention,
    masked_attention,
    masked_focus_attention,
)
from focus_hf.attention.training import gated
from focus_hf.routing import hard_memberships, straight_through
from tests.attention.cases import shared_who


def case(length=40, groups=4, dtype=torch.float64, top_k=1):
    torch.manual_seed(0)
    query = torch.randn(2, 4, length, 8, dtype=dtype)
    key, value = (torch.randn(2, 2, length, 8, dtype=dtype) for _ in range(2))
    scores = torch.randn(2, length, groups, dtype=dtype)
    positions = torch.arange(length).expand(2, length).clone()
    positions[1] = (positions[1] - 5).clamp(min=PADDING)
    return (
        query,
        key,
        value,
        positions,
        torch.softmax(scores, -1),
        hard_memberships(scores, torch.zeros(groups), top_k),
    )


def problem_of(query, key, value, pattern, positions, memberships=None, documents=None, **scores):
    """Gates do not look at memberships."""
    nobody = torch.zeros(*positions.shape, 0, dtype=torch.bool)
    who = shared_who(pattern, positions, nobody if memberships is None else memberships, kv_heads=key.shape[1])
    return Problem(query, key, value, replace(who, documents=documents), Scores(0.3, **scores))


def by_hand(query, key, value, pattern, positions, assignments, scale, gate, strength):
    output = torch.zeros(*query.shape[:3], value.shape[-1], dtype=query.dtype)
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            for i in range(query.shape[2]):
                if positions[b, i] == PADDING:
                    continue
                scores, keys = [], []
                for j in range(i + 1):
                    if positions[b, j] == PADDING:
                        continue
                    score = query[b, h, i] @ key[b, h // 2, j] * scale
                    affinity = min(1.0, float(assignments[b, i] @ assignments[b, j]))
                    distance, is_sink = positions[b, i] - positions[b, j], positions[b, j] < pattern.sink_tokens
                    if distance > pattern.local_window and not is_sink:
                        if gate == "additive":
                            score = score - strength * (1 - affinity)
                        else:
                            score = score * torch.sigmoid(torch.tensor(strength * affinity))
                    scores.append(score)
                    keys.append(j)
                output[b, h, i] = torch.softmax(torch.stack(scores), 0) @ value[b, h // 2, keys]
    return output


@pytest.mark.parametrize("gate", ["additive", "multiplicative"])
@pytest.mark.parametrize("strength", [0.0, 1.0, 6.0])
def test_gates_follow_their_formulas(gate, strength):
    query, key, value, positions, assignments, _ = case()
    pattern = Pattern(5, 2)
    problem = problem_of(query, key, value, pattern, positions)
    output = gated_attention(problem, assignments, gate=gate, strength=strength)
    expected = by_hand(query, key, value, pattern, positions, assignments, 0.3, gate, strength)
    real = (positions != PADDING)[:, None, :, None]
    torch.testing.assert_close(output * real, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_strong_additive_gate_on_hard_memberships_is_hard_inference(top_k):
    query, key, value, positions, _, memberships = case(top_k=top_k)
    pattern = Pattern(5, 2)
    problem = problem_of(query, key, value, pattern, positions, memberships)
    gated = gated_attention(problem, memberships.double(), gate="additive", strength=60.0)
    hard = masked_focus_attention(problem)
    real = (positions != PADDING)[:, None, :, None]
    torch.testing.assert_close(gated * real, hard * real, rtol=1e-6, atol=1e-8)


def spelled_out(query, key, value, pattern, positions, assignments, scale, strength, documents):
    """The additive gate with every score built at once."""
    i, j = positions[:, :, None], positions[:, None, :]
    allowed = (j <= i) & (j != PADDING) & (i != PADDING)
    if documents is not None:
        allowed &= documents[:, :, None] == documents[:, None, :]
    gated = (i - j > pattern.local_window) & (j >= pattern.sink_tokens) & (i >= pattern.dense_below)
    bias = torch.where(gated, strength * (assignments @ assignments.mT - 1.0), 0.0)
    return masked_attention(query, key, value, allowed[:, None], Scores(scale, bias=bias[:, None]))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    length=st.integers(1, 90),
    groups=st.integers(1, 9),
    window=st.integers(0, 40),
    sinks=st.integers(0, 6),
    dense_below=st.sampled_from([0, 0, 7, 50]),
    padding=st.sampled_from(["none", "left", "right"]),
    documents=st.booleans(),
    hard=st.booleans(),
    strength=st.sampled_from([0.0, 1.0, 8.0]),
)
def test_the_additive_gate_is_the_one_with_every_score_at_once(
    seed, length, groups, window, sinks, dense_below, padding, documents, hard, strength
):
    """Output and gradients, those of the scores behind the assignments included."""
    torch.manual_seed(seed)
    query = torch.randn(2, 4, length, 8, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(2, 2, length, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    scores = torch.randn(2, length, groups, dtype=torch.float64, requires_grad=True)
    soft = torch.softmax(scores * 2, dim=-1)
    chosen = hard_memberships(scores.detach(), torch.zeros(groups), 1)
    assignments = straight_through(chosen, soft) if hard else soft
    real = torch.ones(2, length, dtype=torch.bool)
    real[0, : length // 3 if padding == "left" else 0] = False
    real[0, length - length // 3 if padding == "right" else length :] = False
    positions = torch.where(real, real.cumsum(-1) - 1, PADDING)
    which = None
    if documents:
        which = (torch.arange(length) >= length // 2).long().expand(2, length)
        second = real & (which == 1)
        positions = torch.where(second, second.cumsum(-1) - 1, positions)
    pattern = Pattern(window, sinks, dense_below)
    leaves = (query, key, value, scores)
    grad = torch.randn(2, 4, length, 8, dtype=torch.float64) * real[:, None, :, None]
    arguments = (query, key, value, pattern, positions, assignments, 0.3)
    problem = problem_of(query, key, value, pattern, positions, documents=which)
    output = gated_attention(problem, assignments, gate="additive", strength=strength)
    expected = spelled_out(*arguments, strength, which)
    torch.testing.assert_close(output * real[:, None, :, None], expected * real[:, None, :, None])
    gradients = torch.autograd.grad(output, leaves, grad, retain_graph=True)
    for mine, wanted in zip(gradients, torch.autograd.grad(expected, leaves, grad), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("gate", ["additive", "multiplicative"])
def test_spelling_out_some_queries_at_a_time_changes_nothing(gate, monkeypatch):
    query, key, value, positions, assignments, _ = case()
    leaves = [x.requires_grad_() for x in (query, key, value, assignments)]

    def result():
        problem = problem_of(query, key, value, Pattern(5, 2), positions, softcap=3.0)
        output = gated_attention(problem, assignments, gate=gate, strength=2.0)
        real = (positions != PADDING)[:, None, :, None]
        return output * real, *torch.autograd.grad((output * real).square().sum(), leaves)

    whole = result()
    monkeypatch.setattr(gated, "QUERY_CHUNK", 7)
    for mine, wanted in zip(result(), whole, strict=True):
        torch.testing.assert_close(mine, wanted)


def test_memory_of_training_does_not_grow_with_the_square_of_the_length():
    """What a layer keeps for its backward: four times the tokens, about four times as much."""

    def kept(length, gate):
        query, key, value = (torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3))
        assignments = torch.softmax(torch.randn(1, length, 4), -1).requires_grad_()
        storages = {}

        def count(tensor):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            problem = problem_of(query, key, value, Pattern(16, 2), torch.arange(length)[None])
            gated_attention(problem, assignments, gate=gate, strength=2.0)
        return sum(storages.values())

    for gate in ("additive", "multiplicative"):
        assert kept(2048, gate) <= 5 * kept(512, gate)


def test_sinks_and_local_pairs_are_never_gated():
    query, key, value, positions, assignments, _ = case(length=6)
    for gate in ("additive", "multiplicative"):
        problem = problem_of(query, key, value, Pattern(10, 0), positions)
        gated = gated_attention(problem, assignments, gate=gate, strength=9.0)
        open_gate = gated_attention(problem, assignments, gate="additive", strength=0.0)
        real = (positions != PADDING)[:, None, :, None]
        torch.testing.assert_close(gated * real, open_gate * real)


@pytest.mark.parametrize("gate", ["additive", "multiplicative"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_gradients_reach_the_assignments(gate, softcap):
    query, key, value, positions, assignments, _ = case(length=14)
    assignments.requires_grad_(True)

    def loss(g):
        problem = problem_of(query, key, value, Pattern(3, 1), positions, softcap=softcap)
        return gated_attention(problem, g, gate=gate, strength=2.0)[0].square().sum()

    assert torch.autograd.gradcheck(loss, (assignments,), atol=1e-6)
    grad = torch.autograd.grad(loss(assignments), assignments)[0]
    assert grad.abs().max() > 0 and torch.isfinite(grad).all()
