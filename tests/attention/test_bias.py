"""Biases of scores: a bias of rank R is R more columns of queries and keys, which every path can compute."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from focus_hf.attention import (
    Pattern,
    Problem,
    Scores,
    credit_memberships,
    focus_attention,
    gated_attention,
    masked,
)
from focus_hf.routing import straight_through
from tests.attention.cases import shared_who

RANK, LENGTH, HEADS = 3, 50, 4


def both(queries: int = LENGTH, softcap: float | None = None) -> tuple[Problem, Problem]:
    """A problem with a bias for each head, and the same one with the bias in longer heads."""
    torch.manual_seed(queries)
    query = torch.randn(2, HEADS, queries, 8, dtype=torch.float64)
    key, value = (torch.randn(2, HEADS, LENGTH, 8, dtype=torch.float64) for _ in range(2))
    left = torch.randn(2, HEADS, queries, RANK, dtype=torch.float64)
    right = torch.randn(2, HEADS, LENGTH, RANK, dtype=torch.float64)
    memberships = torch.nn.functional.one_hot(torch.randint(4, (2, LENGTH)), 4).bool()
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    who = shared_who(Pattern(6, 2), positions, memberships, queries, HEADS)
    bias = left @ right.transpose(-1, -2)
    biased = Problem(query, key, value, who, Scores(0.5, softcap=softcap, bias=bias))
    longer = Problem(torch.cat([query, left / 0.5], -1), torch.cat([key, right], -1), value, who, Scores(0.5))
    return biased, longer


@pytest.mark.parametrize("queries", [LENGTH, 11, 1])
@pytest.mark.parametrize("path", ["auto", "masked", "grouped"])
def test_a_bias_is_more_columns(queries, path, monkeypatch):
    monkeypatch.setattr(masked, "QUERY_CHUNK", 8)
    biased, longer = both(queries)
    expected = focus_attention(longer, path=path)
    assert torch.allclose(focus_attention(biased, path=path), expected, atol=1e-12)
    assert not torch.allclose(focus_attention(replace(biased, scores=Scores(0.5))), expected, atol=1e-3)


def test_it_is_added_after_soft_capping():
    biased, _ = both(softcap=2.0)
    scores = 2.0 * torch.tanh(biased.query @ biased.key.transpose(-1, -2) * 0.5 / 2.0) + biased.scores.bias
    dense = replace(biased, who=replace(biased.who, reads=torch.ones_like(biased.who.reads)))
    weights = scores.masked_fill(~torch.ones(LENGTH, LENGTH).tril().bool(), -torch.inf).softmax(-1)
    assert torch.allclose(focus_attention(dense), weights @ biased.value, atol=1e-12)


def test_sequences_keep_their_own():
    biased, longer = both()
    for row in range(2):
        query, key, value = (x[row, None] for x in (biased.query, biased.key, biased.value))
        scores = replace(biased.scores, bias=biased.scores.bias.expand(len(biased.query), -1, -1, -1)[row, None])
        alone = focus_attention(Problem(query, key, value, biased.who.sequence(row), scores))
        assert torch.allclose(alone[0], focus_attention(longer)[row], atol=1e-12)


@pytest.mark.parametrize("gate", ["additive", "multiplicative"])
def test_gates_of_training(gate):
    biased, longer = both()
    assignments = torch.randn(2, LENGTH, 4, dtype=torch.float64).softmax(-1)
    found, expected = (gated_attention(x, assignments, gate=gate, strength=3.0) for x in (biased, longer))
    assert torch.allclose(found, expected, atol=1e-9)


def test_the_gradient_of_memberships_and_of_the_bias():
    biased, longer = both()
    soft = torch.randn(2, LENGTH, 4, dtype=torch.float64).softmax(-1)
    weight = torch.randn(2, HEADS, LENGTH, 8, dtype=torch.float64)
    gradients = []
    for problem in (biased, longer):
        assignments = soft.clone().requires_grad_()
        hard = straight_through(problem.who.memberships, assignments)
        output = credit_memberships(focus_attention(problem), hard, problem)
        gradients.append(torch.autograd.grad((output * weight).sum(), assignments)[0])
    assert gradients[1].abs().max() > 1e-3
    assert torch.allclose(*gradients, atol=1e-9)

    left = torch.randn(2, HEADS, LENGTH, RANK, dtype=torch.float64, requires_grad=True)
    right = longer.key[..., -RANK:]
    through_bias = replace(biased, scores=Scores(0.5, bias=left @ right.transpose(-1, -2)))
    through_heads = replace(longer, query=torch.cat([biased.query, left / 0.5], -1))
    found, expected = (
        torch.autograd.grad((focus_attention(x) * weight).sum(), left)[0] for x in (through_bias, through_heads)
    )
    assert torch.allclose(found, expected, atol=1e-9)
