"""Every path against the definition, computed in float64 under an explicit mask."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from focus_hf.attention import (
    PADDING,
    PATHS,
    Pattern,
    Problem,
    Scores,
    WhoAttends,
    attended_pairs,
    biased_focus_attention,
    count_pairs,
    focus_attention,
    grouped,
    grouped_focus_attention,
    make_plan,
    masked_attention,
    masked_focus_attention,
    merge,
)
from focus_hf.attention.kernels import cpu_flash


def definition_in_loops(pattern, positions, memberships):
    """The definition read aloud, pair by pair: the mask's own test."""
    batch, length, groups = memberships.shape
    mask = torch.zeros(batch, length, length, dtype=torch.bool)
    for b in range(batch):
        for qi in range(length):
            for ki in range(length):
                i, j = positions[b, qi].item(), positions[b, ki].item()
                if i == PADDING or j == PADDING or j > i:
                    continue
                shared = any(memberships[b, qi, c] and memberships[b, ki, c] for c in range(groups))
                mask[b, qi, ki] = i - j <= pattern.local_window or j < pattern.sink_tokens or shared
    return mask


def random_case(seed, *, batch, heads, kv_heads, length, head_dim, value_dim, groups, top_k, padding):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, heads, length, head_dim, generator=generator)
    key = torch.randn(batch, kv_heads, length, head_dim, generator=generator)
    value = torch.randn(batch, kv_heads, length, value_dim, generator=generator)
    order = torch.rand(batch, length, groups, generator=generator).argsort(-1)
    memberships = order < top_k
    real = torch.ones(batch, length, dtype=torch.bool)
    if padding == "left":
        real[0, : length // 3] = False
    elif padding == "right":
        real[-1, length - length // 3 :] = False
    elif padding == "scattered":
        real = torch.rand(batch, length, generator=generator) > 0.2
    positions = torch.where(real, real.cumsum(-1) - 1, PADDING)
    return query, key, value, positions, memberships


def reference(query, key, value, pattern, positions, memberships, scale):
    mask = attended_pairs(WhoAttends(pattern, positions, memberships))
    return masked_attention(query.double(), key.double(), value.double(), mask, Scores(scale))


def problem_of(query, key, value, pattern, positions, memberships, scale, **scores):
    return Problem(query, key, value, WhoAttends(pattern, positions, memberships), Scores(scale, **scores))


def relative_error(output, expected):
    return ((output.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-9)).item()


def packed(case_positions, generator):
    """Cut every sequence into documents; positions count anew in each."""
    batch, length = case_positions.shape
    documents = (torch.rand(batch, length, generator=generator) < 0.05).cumsum(-1)
    positions = torch.full((batch, length), PADDING)
    for b in range(batch):
        ranks = {}
        for t in range(length):
            if case_positions[b, t] != PADDING:
                document = documents[b, t].item()
                positions[b, t] = ranks.get(document, 0)
                ranks[document] = positions[b, t].item() + 1
    return positions, documents


#: Everything that may vary in a call, at once.
calls = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 100_000),
        "batch": st.integers(1, 3),
        "kv_heads": st.integers(1, 3),
        "repeat": st.integers(1, 3),
        "length": st.integers(1, 150),
        "head_dim": st.sampled_from([4, 8, 24, 64]),
        "narrow_values": st.booleans(),
        "groups": st.integers(1, 9),
        "window": st.integers(0, 70),
        "sinks": st.integers(0, 9),
        "dense_below": st.sampled_from([0, 0, 5, 40, 200]),
        "padding": st.sampled_from(["none", "left", "right", "scattered"]),
        "documents": st.booleans(),
        "sink_logits": st.booleans(),
        "token_major": st.booleans(),
        "some_in_all_groups": st.booleans(),
        "in_no_group": st.sampled_from(["nobody", "nobody", "some", "all", "there are none"]),
    }
)


def make_call(case, data):
    """A problem in float32, and its mask by definition."""
    generator = torch.Generator().manual_seed(case["seed"])
    length, head_dim = case["length"], case["head_dim"]
    query, key, value, positions, memberships = random_case(
        case["seed"],
        batch=case["batch"],
        heads=case["kv_heads"] * case["repeat"],
        kv_heads=case["kv_heads"],
        length=length,
        head_dim=head_dim,
        value_dim=max(1, head_dim // 2) if case["narrow_values"] else head_dim,
        groups=case["groups"],
        top_k=data.draw(st.integers(1, case["groups"])),
        padding=case["padding"],
    )
    if case["some_in_all_groups"]:
        memberships |= torch.rand(*memberships.shape[:2], 1, generator=generator) < 0.1
    if case["in_no_group"] == "some":
        memberships &= torch.rand(*memberships.shape[:2], 1, generator=generator) < 0.7
    elif case["in_no_group"] == "all":
        memberships &= False
    elif case["in_no_group"] == "there are none":
        memberships = memberships[..., :0]
    documents = None
    if case["documents"]:
        positions, documents = packed(positions, generator)
    if case["token_major"]:  # as transformers passes them
        query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value))
    chunk = data.draw(st.integers(1, length))  # the queries are the last of the tokens
    query = query[:, :, length - chunk :]
    logits = torch.randn(query.shape[1], generator=generator) if case["sink_logits"] else None
    pattern = Pattern(case["window"], case["sinks"], case["dense_below"])
    who = WhoAttends(pattern, positions, memberships, documents)
    problem = Problem(query, key, value, who, Scores(head_dim**-0.5, sink_logits=logits))
    return problem, attended_pairs(who, slice(length - chunk, None))


def in_doubles(problem):
    """The same problem in float64."""
    logits = problem.scores.sink_logits
    return replace(
        problem,
        query=problem.query.double(),
        key=problem.key.double(),
        value=problem.value.double(),
        scores=replace(problem.scores, sink_logits=None if logits is None else logits.double()),
    )


def expected_of(problem, mask):
    double = in_doubles(problem)
    return masked_attention(double.query, double.key, double.value, mask, double.scores)


@settings(max_examples=150, deadline=None)
@given(case=calls, data=st.data())
def test_every_path_equals_the_float64_reference(case, data):
    problem, mask = make_call(case, data)
    expected = expected_of(problem, mask)
    for path in PATHS:
        assert relative_error(focus_attention(problem, path=path), expected) <= 1e-5, path
    assert relative_error(grouped_focus_attention(problem), expected) <= 1e-5
    if problem.scores.sink_logits is None:
        assert relative_error(biased_focus_attention(problem), expected) <= 1e-5


@settings(max_examples=80, deadline=None)
@given(case=calls, data=st.data(), window_queries=st.sampled_from([32, 64, 2048]))
def test_gradients_of_the_grouped_path_equal_those_of_the_reference(case, data, window_queries):
    problem, mask = make_call(case, data)
    problem = in_doubles(problem)
    leaves = [problem.query, problem.key, problem.value]
    leaves += [] if problem.scores.sink_logits is None else [problem.scores.sink_logits]
    for leaf in leaves:
        leaf.requires_grad_()
    expected = masked_attention(*leaves[:3], mask, problem.scores)
    seed = torch.randn_like(expected)
    before, grouped.WINDOW_QUERIES = grouped.WINDOW_QUERIES, window_queries
    try:
        output = grouped_focus_attention(problem)
        gradients = torch.autograd.grad(output, leaves, seed)
    finally:
        grouped.WINDOW_QUERIES = before
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected, leaves, seed), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-8, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(case=calls, data=st.data())
def test_a_plan_computes_every_attended_pair_and_hardly_more(case, data):
    """What the kernels are given covers the attended pairs; with one group each, only window pairs are repeated."""
    case = {**case, "documents": False, "padding": "none", "batch": 1}
    problem, mask = make_call(case, data)
    who, num_queries = problem.who, problem.num_queries
    plan = make_plan(who, num_queries)
    attended = int(mask.sum())
    assert plan.num_queries == num_queries
    assert plan.computed_pairs() >= attended
    if plan.one_group_each:
        windows = num_queries * (who.pattern.local_window + 1)
        sinks = num_queries + who.pattern.sink_tokens**2 * who.memberships.shape[-1]
        assert plan.computed_pairs() <= attended + windows + sinks
    if not who.memberships.any():  # window and sinks: nothing is computed only to be excluded
        assert plan.computed_pairs() == attended


def test_options_that_need_masks_pass_over_the_fast_paths():
    query, key, value, positions, memberships = random_case(
        4, batch=2, heads=4, kv_heads=2, length=60, head_dim=8, value_dim=8, groups=4, top_k=1, padding="left"
    )
    pattern = Pattern(9, 2)
    extra = torch.rand(2, 1, 60, 60) > 0.3
    extra |= torch.eye(60, dtype=torch.bool)
    who, scores = WhoAttends(pattern, positions, memberships, extra_mask=extra), Scores(0.3, softcap=2.0)
    mask = attended_pairs(WhoAttends(pattern, positions, memberships)) & extra
    assert torch.equal(attended_pairs(who), mask)
    assert torch.equal(attended_pairs(replace(who, extra_mask=extra[:, :, 40:]), slice(45, None)), mask[:, :, 45:])
    expected = masked_attention(query.double(), key.double(), value.double(), mask, scores)
    for path in PATHS:
        output = focus_attention(Problem(query, key, value, who, scores), path=path)
        assert relative_error(output, expected) <= 1e-5


def test_a_part_of_the_heads_and_a_sequence_of_the_batch_are_problems_of_their_own():
    query, key, value, positions, memberships = random_case(
        9, batch=2, heads=6, kv_heads=3, length=40, head_dim=8, value_dim=8, groups=4, top_k=1, padding="left"
    )
    extra = torch.rand(2, 6, 40, 40) > 0.3
    documents = torch.zeros(2, 40, dtype=torch.long)
    who = WhoAttends(Pattern(5, 2), positions, memberships, documents, extra)
    problem = Problem(query, key, value, who, Scores(0.3, sink_logits=torch.randn(6)))
    whole = focus_attention(problem)
    heads = [focus_attention(problem.select_heads(range(a, b))) for a, b in ((0, 1), (1, 3))]
    torch.testing.assert_close(torch.cat(heads, dim=1), whole)
    rows = [focus_attention(problem.sequence(row)) for row in range(2)]
    torch.testing.assert_close(torch.cat(rows), whole)
    tensors, put_together = problem.take_apart()
    assert torch.equal(focus_attention(put_together(*tensors)), whole)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    length=st.integers(1, 24),
    groups=st.integers(1, 4),
    window=st.integers(0, 8),
    sinks=st.integers(0, 4),
    padding=st.sampled_from(["none", "left", "right", "scattered"]),
    data=st.data(),
)
def test_the_mask_is_its_definition(seed, length, groups, window, sinks, padding, data):
    top_k = data.draw(st.integers(1, groups))
    *_, positions, memberships = random_case(
        seed,
        batch=2,
        heads=1,
        kv_heads=1,
        length=length,
        head_dim=4,
        value_dim=4,
        groups=groups,
        top_k=top_k,
        padding=padding,
    )
    pattern = Pattern(window, sinks)
    mask = attended_pairs(WhoAttends(pattern, positions, memberships))[:, 0]
    expected = definition_in_loops(pattern, positions, memberships)
    assert torch.equal(mask, expected)
    if padding == "none":
        assert count_pairs(pattern, memberships, chunk=5) == (int(expected.sum()), length * (length + 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("groups", "top_k"), [(8, 1), (8, 2), (4, 3)])
def test_half_precision_is_at_most_twice_the_dense_kernels_error(dtype, groups, top_k):
    query, key, value, positions, memberships = random_case(
        1,
        batch=2,
        heads=4,
        kv_heads=2,
        length=300,
        head_dim=64,
        value_dim=64,
        groups=groups,
        top_k=top_k,
        padding="none",
    )
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    pattern, scale = Pattern(32, 4), 64**-0.5

    everything = torch.ones_like(memberships)
    dense = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    dense_error = (dense.double() - reference(query, key, value, pattern, positions, everything, scale)).abs().max()

    expected = reference(query, key, value, pattern, positions, memberships, scale)
    for path in (grouped_focus_attention, biased_focus_attention):
        output = path(problem_of(query, key, value, pattern, positions, memberships, scale))
        assert output.dtype == dtype
        assert (output.double() - expected).abs().max() <= 2 * dense_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_extreme_scores_do_not_leak_through_the_penalty(dtype):
    """A pair that must not count twice stays out even when its score is far above all others."""
    query, key, value, positions, memberships = random_case(
        2, batch=1, heads=2, kv_heads=2, length=200, head_dim=64, value_dim=64, groups=6, top_k=3, padding="none"
    )
    query, key = (query * 12).to(dtype), (key * 12).to(dtype)  # scores up to several hundred
    pattern, scale = Pattern(16, 4), 64**-0.5
    problem = problem_of(query, key, value.to(dtype), pattern, positions, memberships, scale)
    output = grouped_focus_attention(problem)
    expected = reference(query, key, value.to(dtype), pattern, positions, memberships, scale)
    assert relative_error(output, expected) <= (1e-4 if dtype == torch.float32 else 1e-2)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), length=st.integers(2, 120), top_k=st.integers(1, 4), data=st.data())
def test_a_chunk_against_a_longer_cache_equals_the_whole(seed, length, top_k, data):
    split = data.draw(st.integers(1, length - 1))
    query, key, value, positions, memberships = random_case(
        seed,
        batch=2,
        heads=4,
        kv_heads=2,
        length=length,
        head_dim=8,
        value_dim=8,
        groups=4,
        top_k=top_k,
        padding="left",
    )
    pattern, scale = Pattern(9, 2), 8**-0.5
    problem = problem_of(query, key, value, pattern, positions, memberships, scale)
    whole = masked_focus_attention(problem)
    part = masked_focus_attention(replace(problem, query=query[:, :, split:]))
    torch.testing.assert_close(part, whole[:, :, split:], rtol=1e-5, atol=1e-6)


def test_masked_path_in_blocks_of_queries_equals_one_block(monkeypatch):
    from focus_hf.attention import masked

    args = random_case(
        3, batch=2, heads=2, kv_heads=1, length=70, head_dim=8, value_dim=8, groups=3, top_k=1, padding="right"
    )
    query, key, value, positions, memberships = args
    problem = problem_of(query, key, value, Pattern(5, 1), positions, memberships, 0.3)
    whole = masked_focus_attention(problem)
    monkeypatch.setattr(masked, "QUERY_CHUNK", 16)
    blocks = masked_focus_attention(problem)
    torch.testing.assert_close(blocks, whole, rtol=1e-5, atol=1e-6)


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


def test_sinks_are_members_of_every_group():
    """Marking sinks as members of all groups and naming them in the pattern is the same function."""
    query, key, value, positions, memberships = random_case(
        5, batch=1, heads=2, kv_heads=2, length=90, head_dim=8, value_dim=8, groups=4, top_k=1, padding="none"
    )
    named = masked_focus_attention(problem_of(query, key, value, Pattern(6, 3), positions, memberships, 0.3))
    marked = memberships.clone()
    marked[:, :3] = True
    as_members = masked_focus_attention(problem_of(query, key, value, Pattern(6, 0), positions, marked, 0.3))
    torch.testing.assert_close(named, as_members)


def test_without_groups_only_window_and_sinks_remain():
    query, key, value, positions, memberships = random_case(
        6, batch=1, heads=2, kv_heads=2, length=90, head_dim=8, value_dim=8, groups=4, top_k=1, padding="none"
    )
    nobody = torch.zeros_like(memberships)
    expected = reference(query, key, value, Pattern(6, 2), positions, nobody, 0.3)
    output = masked_focus_attention(problem_of(query, key, value, Pattern(6, 2), positions, nobody, 0.3))
    assert relative_error(output, expected) <= 1e-5
