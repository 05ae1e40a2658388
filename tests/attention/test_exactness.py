"""Every path against the definition, computed in float64 under an explicit mask."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from focus_hf.attention import (
    PATHS,
    Pattern,
    Problem,
    Scores,
    attended_pairs,
    focus_attention,
    masked,
    masked_attention,
    masked_focus_attention,
)
from focus_hf.attention.kernels import merge
from focus_hf.attention.kernels.cpu import cpu_flash
from focus_hf.attention.paths import usable_paths
from focus_hf.attention.prompt import grouped, grouped_focus_attention, make_plan
from tests.attention.cases import (
    calls,
    expected_of,
    general,
    in_doubles,
    make_call,
    make_positions,
    relative_error,
    shared,
    shared_who,
)

chunks = st.sampled_from([1.0, 0.6, 0.1, 0.0])


@settings(max_examples=150, deadline=None)
@given(case=calls, routing=shared | general, chunk=chunks)
def test_every_path_equals_the_float64_reference(case, routing, chunk):
    problem, mask = make_call(case, routing, chunk)
    expected = expected_of(problem, mask)
    for path in {*PATHS} & {*usable_paths(problem), "auto", "masked"}:
        assert relative_error(focus_attention(problem, path=path), expected) <= 1e-5, path


@settings(max_examples=80, deadline=None)
@given(case=calls, routing=shared, chunk=chunks, window_queries=st.sampled_from([32, 64, 2048]))
def test_gradients_of_the_grouped_path_equal_those_of_the_reference(case, routing, chunk, window_queries):
    problem, mask = make_call(case, routing, chunk)
    problem = in_doubles(problem)
    leaves = [problem.query, problem.key, problem.value]
    leaves += [] if problem.scores.sink_logits is None else [problem.scores.sink_logits]
    for leaf in leaves:
        leaf.requires_grad_()
    expected = masked_attention(*leaves[:3], mask, problem.scores)
    seed = torch.randn_like(expected)
    before, grouped.WINDOW_QUERIES = grouped.WINDOW_QUERIES, window_queries
    try:
        gradients = torch.autograd.grad(grouped_focus_attention(problem), leaves, seed)
    finally:
        grouped.WINDOW_QUERIES = before
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected, leaves, seed), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-8, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(case=calls, routing=general | shared)
def test_what_needs_a_gradient_gets_it_whatever_the_routing(case, routing):
    problem, mask = make_call(case, routing)
    problem = in_doubles(problem)
    leaves = [x.requires_grad_() for x in (problem.query, problem.key, problem.value)]
    expected = masked_attention(*leaves, mask, problem.scores)
    gradients = torch.autograd.grad(focus_attention(problem).sum(), leaves)
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected.sum(), leaves), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-8, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(case=calls, routing=shared, chunk=chunks)
def test_a_plan_computes_every_attended_pair_and_hardly_more(case, routing, chunk):
    """What the kernels are given covers the attended pairs; with one group each, only window pairs are repeated."""
    problem, mask = make_call({**case, "documents": False, "padding": "none", "batch": 1}, routing, chunk)
    who, num_queries = problem.who, problem.num_queries
    parts = make_plan(problem)
    attended, computed = int(mask[:, 0].sum()), sum(part.computed_pairs() for part in parts)
    assert torch.equal(torch.cat([part.queries for part in parts]).unique(), torch.arange(num_queries))
    assert computed >= attended
    if all(part.call.exclude is None or part.call.window is not None for part in parts):  # one group each
        windows = num_queries * (who.pattern.local_window + 1)
        sinks = num_queries + who.pattern.sink_tokens**2 * who.memberships.shape[-1]
        assert computed <= attended + windows + sinks
    if not who.memberships.any():  # window and sinks: nothing is computed only to be excluded
        assert computed == attended


def shared_problem(seed, *, groups, top_k, pattern, length=200, batch=1, heads=4, kv_heads=2, dim=64, padding="none"):
    """A prompt with the paper's routing, in float32."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(batch, count, length, dim, generator=generator) for count in (heads, kv_heads, kv_heads)
    )
    memberships = torch.rand(batch, length, groups, generator=generator).argsort(-1) < top_k
    positions, _ = make_positions(padding, False, batch, length, generator)
    who = shared_who(pattern, positions, memberships, kv_heads=kv_heads)
    return Problem(query, key, value, who, Scores(dim**-0.5))


def test_options_that_need_masks_pass_over_the_fast_paths():
    problem = shared_problem(4, groups=4, top_k=1, pattern=Pattern(9, 2), length=60, batch=2, dim=8, padding="left")
    extra = (torch.rand(2, 1, 60, 60) > 0.3) | torch.eye(60, dtype=torch.bool)
    mask = attended_pairs(problem.who) & extra
    problem = replace(problem, who=replace(problem.who, extra_mask=extra), scores=Scores(0.3, softcap=2.0))
    for path in PATHS:
        assert relative_error(focus_attention(problem, path=path), expected_of(problem, mask)) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("groups", "top_k"), [(8, 1), (8, 2), (4, 3)])
@pytest.mark.parametrize("chunk", [1, 2, 300])
def test_half_precision_is_at_most_twice_the_dense_kernels_error(dtype, groups, top_k, chunk):
    problem = shared_problem(1, groups=groups, top_k=top_k, pattern=Pattern(32, 4), length=300, batch=2)
    query, key, value = (x.to(dtype) for x in (problem.query, problem.key, problem.value))
    problem = replace(problem, query=query, key=key, value=value)
    dense = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    causal = torch.ones(1, 1, 300, 300, dtype=torch.bool).tril()
    dense_error = (dense.double() - expected_of(problem, causal)).abs().max()
    who = replace(problem.who, reads=problem.who.reads[:, :, -chunk:])
    problem = replace(problem, query=query[:, :, -chunk:], who=who)
    expected = expected_of(problem)
    for path in usable_paths(problem):
        output = focus_attention(problem, path=path)
        assert output.dtype == dtype
        assert (output.double() - expected).abs().max() <= 2 * dense_error, path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_extreme_scores_do_not_leak_through_the_penalty(dtype):
    """A pair that must not count twice, or is hidden, stays out even when its score is far above all others."""
    problem = shared_problem(2, groups=6, top_k=3, pattern=Pattern(16, 4), heads=2)
    tensors = {"query": (problem.query * 12).to(dtype), "key": (problem.key * 12).to(dtype)}  # scores of hundreds
    problem = replace(problem, **tensors, value=problem.value.to(dtype))
    for path in usable_paths(problem):
        error = relative_error(focus_attention(problem, path=path), expected_of(problem))
        assert error <= (1e-4 if dtype == torch.float32 else 1e-2), path


@settings(max_examples=40, deadline=None)
@given(case=calls, routing=shared | general, split=st.floats(0, 0.99))
def test_a_chunk_against_a_longer_cache_equals_the_whole(case, routing, split):
    problem, _ = make_call(case, {**routing, "extra_mask": "none"})
    whole = focus_attention(problem)
    first = int(split * problem.num_queries)
    who = replace(problem.who, reads=problem.who.reads[:, :, first:])
    part = focus_attention(replace(problem, query=problem.query[:, :, first:], who=who))
    torch.testing.assert_close(part, whole[:, :, first:], rtol=1e-5, atol=1e-5)


def test_blocks_of_queries_change_nothing(monkeypatch):
    problem = shared_problem(3, groups=3, top_k=1, pattern=Pattern(5, 1), length=70, batch=2, dim=8, padding="right")
    whole = masked_focus_attention(problem)
    monkeypatch.setattr(masked, "QUERY_CHUNK", 16)
    torch.testing.assert_close(masked_focus_attention(problem), whole, rtol=1e-5, atol=1e-6)


def test_softcap_and_sink_logits_follow_their_formulas():
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 6, 4, dtype=torch.float64) for _ in range(3))
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    logits = torch.tensor([0.5, -1.0], dtype=torch.float64)
    output = masked_attention(query, key, value, mask, Scores(0.5, softcap=2.0, sink_logits=logits))
    for head in range(2):
        for i in range(6):
            scores = [2.0 * torch.tanh(query[0, head, i] @ key[0, head, j] * 0.5 / 2.0) for j in range(i + 1)]
            weights = torch.softmax(torch.stack([*scores, logits[head]]), 0)[:-1]
            torch.testing.assert_close(output[0, head, i], weights @ value[0, head, : i + 1])


def test_merge_of_two_parts_is_the_whole_also_with_empty_parts():
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 10, 2, 8) for _ in range(3))
    left = cpu_flash(query, key[:, :4], value[:, :4], 0.3)
    right = cpu_flash(query, key[:, 4:], value[:, 4:], 0.3)
    whole, lse = cpu_flash(query, key, value, 0.3)
    merged, merged_lse = merge(*left, *right)
    torch.testing.assert_close(merged, whole)
    torch.testing.assert_close(merged_lse, lse)
    nothing = (torch.zeros_like(whole), torch.full_like(lse, float("-inf")))
    torch.testing.assert_close(merge(whole, lse, *nothing)[0], whole)
    assert torch.equal(merge(*nothing, *nothing)[0], torch.zeros_like(whole))


@settings(max_examples=100, deadline=None)
@given(
    case=calls,
    routing=shared | general,
    length=st.integers(1, 900),
    dropped=st.sampled_from([0, 0, 3, 200]),
    layout=st.sampled_from(["as it is", "room behind", "room behind every token"]),
)
def test_one_new_token_of_each_sequence(case, routing, length, dropped, layout):
    """Also against a cache that has dropped its oldest tokens, or has room behind those it has seen."""
    case = {**case, "length": length, "documents": False}
    problem, _ = make_call(case, {**routing, "extra_mask": "none"}, 0.0)
    if case["padding"] == "none":
        who = replace(problem.who, positions=problem.who.positions + dropped, first_position=dropped)
        problem = replace(problem, who=who)
    if layout == "room behind":
        key, value = (F.pad(x, (0, 0, 0, 70))[:, :, :length] for x in (problem.key, problem.value))
        problem = replace(problem, key=key, value=value)
    elif layout == "room behind every token":
        key, value = (F.pad(x, (0, 3))[..., :-3] for x in (problem.key, problem.value))
        problem = replace(problem, key=key, value=value)
    assert relative_error(focus_attention(problem), expected_of(problem)) <= 1e-5
