"""Attention by a plan that is made on the device: exact, with shapes known beforehand, and nothing read back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from focus_hf.attention import (
    PADDING,
    Known,
    Pattern,
    Problem,
    Scores,
    WhoAttends,
    attended_pairs,
    focus_attention,
    grouped_focus_attention,
    masked_attention,
)
from focus_hf.attention.device_plan import make_device_plan
from focus_hf.bench import LaunchCounter
from focus_hf.bench.stand_in import FlashStandIn
from tests.attention.test_exactness import packed, random_case

#: Everything that may vary in a call, at once.
calls = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 100_000),
        "batch": st.integers(1, 3),
        "kv_heads": st.integers(1, 2),
        "repeat": st.integers(1, 2),
        "length": st.integers(1, 90),
        "head_dim": st.sampled_from([4, 8, 24]),
        "groups": st.integers(1, 6),
        "groups_each": st.integers(0, 6),
        "window": st.integers(0, 40),
        "sinks": st.integers(0, 6),
        "dense_below": st.sampled_from([0, 0, 5, 40, 200]),
        "padding": st.sampled_from(["none", "none", "left", "right", "scattered"]),
        "documents": st.booleans(),
        "sink_logits": st.booleans(),
        "told_unpadded": st.booleans(),
    }
)


def make_problem(case, data):
    """A problem in float64 that the device path takes, and its mask by definition."""
    generator = torch.Generator().manual_seed(case["seed"])
    groups_each, length, head_dim = min(case["groups_each"], case["groups"]), case["length"], case["head_dim"]
    heads = case["kv_heads"] * case["repeat"]
    query, key, value, positions, memberships = random_case(
        case["seed"], batch=case["batch"], heads=heads, kv_heads=case["kv_heads"], length=length, head_dim=head_dim,
        value_dim=head_dim, groups=case["groups"], top_k=groups_each, padding=case["padding"],
    )  # fmt: skip
    documents, most = None, 1
    if case["documents"]:
        positions, documents = packed(positions, generator)
        most = max(1, int((positions == 0).sum(dim=-1).max())) + data.draw(st.integers(0, 2))
    chunk = data.draw(st.integers(1, length))
    unpadded = case["told_unpadded"] and case["padding"] == "none"
    known = Known(groups_each, most, unpadded)
    pattern = Pattern(case["window"], case["sinks"], case["dense_below"])
    who = WhoAttends(pattern, positions, memberships, documents, known=known)
    logits = torch.randn(heads, generator=generator).double() if case["sink_logits"] else None
    tensors = query[:, :, length - chunk :].double(), key.double(), value.double()
    return Problem(*tensors, who, Scores(head_dim**-0.5, sink_logits=logits)), attended_pairs(
        who, slice(length - chunk, None)
    )


@settings(max_examples=120, deadline=None)
@given(case=calls, data=st.data())
def test_it_equals_the_definition(case, data):
    problem, mask = make_problem(case, data)
    expected = masked_attention(problem.query, problem.key, problem.value, mask, problem.scores)
    output = grouped_focus_attention(problem, FlashStandIn())
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-10)


@settings(max_examples=50, deadline=None)
@given(case=calls, data=st.data())
def test_so_do_its_gradients(case, data):
    problem, mask = make_problem(case, data)
    leaves = [problem.query, problem.key, problem.value]
    leaves += [] if problem.scores.sink_logits is None else [problem.scores.sink_logits]
    for leaf in leaves:
        leaf.requires_grad_()
    expected = masked_attention(*leaves[:3], mask, problem.scores)
    seed = torch.randn_like(expected)
    gradients = torch.autograd.grad(grouped_focus_attention(problem, FlashStandIn()), leaves, seed)
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected, leaves, seed), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)  # CUDA's backward takes float32 logsumexps


def a_problem(batch=2, queries=70, *, groups_each=1, padded=False, documents=False, dense_below=0, sinks=4, groups=4):
    """An ordinary one in float32; real tensors, or fake ones under a mode."""
    query = torch.randn(batch, 4, queries, 16)
    key, value = torch.randn(batch, 2, 70, 16), torch.randn(batch, 2, 70, 16)
    memberships = torch.rand(batch, 70, groups).argsort(-1) < groups_each
    positions = torch.arange(70).expand(batch, -1).clone()
    of_document = None
    if padded:
        positions = torch.where(positions < 9, PADDING, positions - 9)
    if documents:
        of_document = torch.arange(70).expand(batch, -1) // 35
        positions = positions % 35
    known = Known(groups_each, 2 if documents else 1, not padded)
    who = WhoAttends(Pattern(8, sinks, dense_below), positions, memberships, of_document, known=known)
    return Problem(query, key, value, who, Scores(0.25))


KINDS = [
    {},
    {"groups_each": 2},
    {"groups_each": 0},
    {"padded": True},
    {"padded": True, "groups_each": 2},
    {"documents": True},
    {"dense_below": 20},
    {"queries": 30},
    {"queries": 1},
    {"padded": True, "documents": True, "groups_each": 0, "dense_below": 5, "queries": 50},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_nothing_depends_on_data(kind):
    """On fake tensors whatever reads a value, or makes a shape of one, raises."""
    with FakeTensorMode():
        problem = a_problem(**kind)
        output = focus_attention(problem, path="grouped", kernel=FlashStandIn())
    assert output.shape == problem.query.shape


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_operations_do_not_grow_with_the_batch_and_none_waits(kind):
    counts = []
    for batch in (2, 8, 32):
        problem = a_problem(batch, **kind)
        with LaunchCounter() as counter:
            focus_attention(problem, path="grouped", kernel=FlashStandIn())
        assert not counter.syncs
        counts.append(counter.operations.total())
    assert len(set(counts)) == 1


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_it_is_one_graph(kind):
    torch.compiler.reset()
    problem = a_problem(**kind)
    tensors = problem.query, problem.key, problem.value, problem.who.positions, problem.who.memberships

    def attend(query, key, value, positions, memberships):
        who = replace(problem.who, positions=positions, memberships=memberships)
        return focus_attention(Problem(query, key, value, who, problem.scores), path="grouped", kernel=FlashStandIn())

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), attend(*tensors))
    torch.compiler.reset()


def test_inductor_takes_it():
    problem = a_problem(groups_each=2)

    def attend(query, key, value):
        some = replace(problem, query=query, key=key, value=value)
        return focus_attention(some, path="grouped", kernel=FlashStandIn())

    compiled = torch.compile(attend, fullgraph=True)
    tensors = problem.query, problem.key, problem.value
    torch.testing.assert_close(compiled(*tensors), attend(*tensors), rtol=1e-4, atol=1e-5)
    torch.compiler.reset()


@pytest.mark.parametrize("groups_each", [1, 2])
def test_a_plan_takes_the_room_that_was_promised(groups_each):
    problem = a_problem(3, groups_each=groups_each, padded=True)
    groups = make_device_plan(problem.who, 70).parts[0]
    assert groups.keys is not None and groups.keys.shape[0] == 3 * (70 * groups_each + 4 * (4 - groups_each))
    assert groups.rows.cu_keys[-1] == 3 * (61 * groups_each + 4 * (4 - groups_each))
    assert groups.rows.longest_key == 70


@pytest.mark.parametrize("padded", [False, True])
def test_one_token_under_a_mask_is_one_call_and_copies_no_key(padded):
    problem = a_problem(8, queries=1, padded=padded)
    mask = attended_pairs(problem.who, slice(69, None))
    expected = masked_attention(problem.query, problem.key, problem.value, mask, problem.scores)
    for path in ("auto", "masked"):  # on a CPU, too, it is the cheapest
        with LaunchCounter() as counter:
            output = focus_attention(problem, path=path)
        torch.testing.assert_close(output, expected)
        assert not counter.syncs and counter.operations["_scaled_dot_product_flash_attention_for_cpu"] == 1
        assert "repeat_interleave" not in counter.operations and counter.operations["clone"] == 0
