"""Gradients of memberships through hard attention, against the formula spelled out with autograd."""

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
    credit_memberships,
    find_kernel,
    focus_attention,
    masked_focus_attention,
)
from focus_hf.attention.definition import dense_pairs, without_groups
from focus_hf.attention.training import hard_gate
from focus_hf.routing import hard_memberships, straight_through
from tests.attention.cases import shared_who


def first_order(problem, assignments):
    """Hard attention; to it comes, with a value of zero, what each distant pair adds to window and sinks."""
    query, key, value, who = problem.query, problem.key, problem.value, problem.who
    pattern, positions = who.pattern, who.positions
    scale, softcap, sinks = problem.scores.scale, problem.scores.softcap, problem.scores.sink_logits
    output = masked_focus_attention(problem)
    alone = masked_focus_attention(replace(problem, who=without_groups(who)))
    possible = dense_pairs(who)
    q, k, v = (x.detach() for x in (query, key, value))
    k, v = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~possible, float("-inf"))
    columns = (
        scores
        if sinks is None
        else torch.cat([scores, sinks.detach()[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    )
    weights = torch.exp(scores - torch.logsumexp(columns, -1, keepdim=True)).masked_fill(~possible, 0.0)
    i, j = positions[:, :, None], positions[:, None]
    distant = (i - j > pattern.local_window) & (j >= pattern.sink_tokens) & (i >= pattern.dense_below)
    shared = torch.where(distant, assignments @ assignments.mT, 0.0)[:, None]
    opened = weights * (shared - shared.detach())
    return output + opened @ v - opened.sum(-1, keepdim=True) * alone.detach()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    length=st.integers(1, 90),
    groups=st.integers(1, 7),
    window=st.integers(0, 40),
    sinks=st.integers(0, 6),
    dense_below=st.sampled_from([0, 0, 9]),
    padding=st.sampled_from(["none", "left", "scattered"]),
    documents=st.booleans(),
    softcap=st.sampled_from([None, None, 3.0]),
    sink_logits=st.booleans(),
    data=st.data(),
)
def test_output_is_hard_attention_and_every_distant_pair_has_a_gradient(
    seed, length, groups, window, sinks, dense_below, padding, documents, softcap, sink_logits, data
):
    torch.manual_seed(seed)
    top_k = data.draw(st.integers(1, groups))
    query = torch.randn(2, 4, length, 8, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(2, 2, length, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    scores = torch.randn(2, length, groups, dtype=torch.float64, requires_grad=True)
    memberships = hard_memberships(scores.detach(), torch.zeros(groups), top_k)
    assignments = straight_through(memberships, torch.softmax(scores, dim=-1))
    logits = torch.randn(4, dtype=torch.float64, requires_grad=True) if sink_logits else None
    real = torch.ones(2, length, dtype=torch.bool)
    if padding == "left":
        real[0, : length // 3] = False
    elif padding == "scattered":
        real = torch.rand(2, length) > 0.2
    positions = torch.where(real, real.cumsum(-1) - 1, PADDING)
    which = None
    if documents:
        which = (torch.arange(length) >= length // 2).long().expand(2, length)
        second = real & (which == 1)
        positions = torch.where(second, second.cumsum(-1) - 1, positions)
    pattern = Pattern(window, sinks, dense_below)
    who = replace(shared_who(pattern, positions, memberships, kv_heads=2), documents=which)
    problem = Problem(query, key, value, who, Scores(0.3, softcap, logits))
    output = credit_memberships(focus_attention(problem), assignments, problem)
    expected = first_order(problem, assignments)
    torch.testing.assert_close(output, expected)
    leaves = [query, key, value, scores, *([] if logits is None else [logits])]
    grad = torch.randn_like(expected) * real[:, None, :, None]
    gradients = torch.autograd.grad(output, leaves, grad, retain_graph=True)
    for mine, wanted in zip(gradients, torch.autograd.grad(expected, leaves, grad), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=1e-8)


def case(length=40):
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, length, 8) for _ in range(3))
    memberships = hard_memberships(torch.randn(1, length, 4), torch.zeros(4), 1)
    who = shared_who(Pattern(5, 2), torch.arange(length)[None], memberships, kv_heads=2)
    return Problem(query, key, value, who, Scores(0.3))


def test_the_models_own_mask_and_blocks_of_queries(monkeypatch):
    """A sliding window as an explicit mask equals shorter documents; blocks change nothing."""
    problem = case()
    documents = (torch.arange(40) >= 25).long()[None]
    mask = (documents[:, :, None] == documents[:, None])[:, None]
    grad = torch.randn(1, 2, 40, 8)
    found = []
    for chunk in (256, 7):
        monkeypatch.setattr(hard_gate, "QUERY_CHUNK", chunk)
        for who, scores in (({"extra_mask": mask}, {}), ({"documents": documents}, {"softcap": 1e6})):
            again = replace(problem, who=replace(problem.who, **who), scores=replace(problem.scores, **scores))
            assignments = problem.who.memberships.float().requires_grad_()
            output = credit_memberships(focus_attention(again), assignments, again)
            found.append(torch.autograd.grad(output, assignments, grad)[0])
    for gradient in found[1:]:
        torch.testing.assert_close(gradient, found[0])


def test_the_gradient_points_to_the_better_group():
    """One far key answers the query: moving the query to that key's group is worth most of all."""
    length, groups = 30, 3
    query, key, value = (torch.zeros(1, 1, length, 8) for _ in range(3))
    query[0, 0, -1, 0] = key[0, 0, 7, 0] = 6.0
    value[0, 0, 7, 1] = 1.0
    memberships = torch.nn.functional.one_hot(torch.arange(length) % groups, groups).bool()[None]
    assert memberships[0, 7].int().argmax() != memberships[0, -1].int().argmax()
    assignments = memberships.float().requires_grad_()
    who = shared_who(Pattern(4, 0), torch.arange(length)[None], memberships)
    problem = Problem(query, key, value, who, Scores(1.0))
    output = credit_memberships(focus_attention(problem), assignments, problem)
    output[0, 0, -1, 1].backward()
    assert assignments.grad[0, -1].argmax() == memberships[0, 7].int().argmax()
    assert assignments.grad[0, 7].argmax() == memberships[0, -1].int().argmax()


def test_a_kernel_that_cannot_take_the_longer_heads_is_passed_over(monkeypatch):
    problem = case()
    narrow, asked = find_kernel(problem.query, problem.value), []

    def unsupported(q, v):
        asked.append(q.shape[-1])
        return "heads are too wide" if q.shape[-1] > 8 else None

    output = focus_attention(problem)

    def credit(kernel):
        assignments = problem.who.memberships.float().requires_grad_()
        given = credit_memberships(output, assignments, problem, kernel=kernel)
        return torch.autograd.grad(given.sum(), assignments)[0]

    expected = credit(narrow)
    monkeypatch.setattr(narrow, "unsupported", unsupported)
    monkeypatch.setattr(narrow, "_backward", None)  # it must not be called
    for kernel in (narrow, None):
        torch.testing.assert_close(credit(kernel), expected)
    assert asked.count(16) >= 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    problem = case(80)
    query, key, value = problem.query, problem.key, problem.value
    grad = torch.randn(1, 2, 80, 8)

    def credit(*tensors):
        assignments = problem.who.memberships.float().requires_grad_()
        again = Problem(*tensors, problem.who, problem.scores)
        output = credit_memberships(focus_attention(again), assignments, again)
        return torch.autograd.grad(output, assignments, grad.to(output.dtype))[0]

    exact, rounded = credit(query, key, value), credit(*(x.to(dtype) for x in (query, key, value)))
    assert rounded.dtype == torch.float32
    assert (rounded - exact).abs().max() <= 0.03 * exact.abs().max()
