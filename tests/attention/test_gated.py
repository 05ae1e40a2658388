"""The gates of training against their formulas, and their relation to the hard mask."""

from __future__ import annotations

import pytest
import torch

from focus_hf.attention import PADDING, Pattern, gated_attention, masked_focus_attention
from focus_hf.routing import hard_memberships


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
    output = gated_attention(query, key, value, pattern, positions, assignments, 0.3, gate=gate, strength=strength)
    expected = by_hand(query, key, value, pattern, positions, assignments, 0.3, gate, strength)
    real = (positions != PADDING)[:, None, :, None]
    torch.testing.assert_close(output * real, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_strong_additive_gate_on_hard_memberships_is_hard_inference(top_k):
    query, key, value, positions, _, memberships = case(top_k=top_k)
    pattern = Pattern(5, 2)
    gated = gated_attention(
        query, key, value, pattern, positions, memberships.double(), 0.3, gate="additive", strength=60.0
    )
    hard = masked_focus_attention(query, key, value, pattern, positions, memberships, 0.3)
    real = (positions != PADDING)[:, None, :, None]
    torch.testing.assert_close(gated * real, hard * real, rtol=1e-6, atol=1e-8)


def test_sinks_and_local_pairs_are_never_gated():
    query, key, value, positions, assignments, _ = case(length=6)
    for gate in ("additive", "multiplicative"):
        gated = gated_attention(
            query, key, value, Pattern(10, 0), positions, assignments, 0.3, gate=gate, strength=9.0
        )
        open_gate = gated_attention(
            query, key, value, Pattern(10, 0), positions, assignments, 0.3, gate="additive", strength=0.0
        )
        real = (positions != PADDING)[:, None, :, None]
        torch.testing.assert_close(gated * real, open_gate * real)


@pytest.mark.parametrize("gate", ["additive", "multiplicative"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_gradients_reach_the_assignments(gate, softcap):
    query, key, value, positions, assignments, _ = case(length=14)
    assignments.requires_grad_(True)

    def loss(g):
        return (
            gated_attention(
                query, key, value, Pattern(3, 1), positions, g, 0.3, gate=gate, strength=2.0, softcap=softcap
            )[0]
            .square()
            .sum()
        )

    assert torch.autograd.gradcheck(loss, (assignments,), atol=1e-6)
    grad = torch.autograd.grad(loss(assignments), assignments)[0]
    assert grad.abs().max() > 0 and torch.isfinite(grad).all()
