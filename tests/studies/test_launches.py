"""`python -m studies.launches`: what a layer asks of the device, counted without one."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache, StaticCache

from focus_hf.attention import Pattern, Problem, Scores, masked_focus_attention
from focus_hf.attention.prompt import grouped_focus_attention
from focus_hf.bench import Setting
from studies.launches import count
from studies.launches.__main__ import cells
from studies.launches.counting import LaunchCounter
from studies.launches.stand_in import FlashStandIn
from tests.attention.cases import shared_who


@pytest.mark.parametrize(
    ("call", "operations", "syncs"),
    [
        (lambda x: x.view(2, 3).T[0] + 1, {"add": 1}, {}),
        (lambda x: torch.empty_like(x).copy_(x), {"copy_": 1}, {}),
        (lambda x: x.sum().item(), {"sum": 1}, {"_local_scalar_dense": 1}),
        (lambda x: bool(x.any()), {"any": 1}, {"_local_scalar_dense": 1}),
        (lambda x: x.tolist(), {}, {"tolist": 1}),
        (lambda x: x[x > 2], {"gt": 1, "index": 1}, {"index": 1}),
        (lambda x: x[torch.arange(3)], {"arange": 1, "index": 1}, {}),
        (lambda x: x.nonzero(), {"nonzero": 1}, {"nonzero": 1}),
        (lambda x: x.repeat_interleave(torch.arange(6)), None, {"repeat_interleave": 1}),
        (lambda x: x.masked_select(x > 2), None, {"masked_select": 1}),
        (lambda x: x + torch.tensor([1.0]), {"add": 1}, {"tensor": 1}),
    ],
)
def test_operations_and_syncs_are_counted(call, operations, syncs):
    x = torch.arange(6.0)
    with LaunchCounter() as counter:
        call(x)
    assert dict(counter.syncs) == syncs
    assert operations is None or dict(counter.operations) == operations
    call(x)
    assert dict(counter.syncs) == syncs  # counts while it is entered, and only then


def test_fake_tensors_are_counted_too():
    with FakeTensorMode():
        x = torch.ones(4, 4)
        with LaunchCounter() as counter:
            (x @ x).relu()
    assert dict(counter.operations) == {"mm": 1, "relu": 1}


@pytest.mark.parametrize("top_k", [1, 2])
def test_the_stand_in_computes_what_the_device_would(top_k):
    query, key, value = (torch.randn(2, heads, 90, 8) for heads in (4, 2, 2))
    memberships = torch.rand(2, 90, 4).argsort(-1) < top_k
    who = shared_who(Pattern(9, 2), torch.arange(90).expand(2, -1), memberships, kv_heads=2)
    problem = Problem(query, key, value, who, Scores(0.3))
    with LaunchCounter() as counter:
        output = grouped_focus_attention(problem, FlashStandIn())
    torch.testing.assert_close(output, masked_focus_attention(problem), rtol=1e-5, atol=1e-5)
    assert counter.operations["varlen_stand_in"] >= 2 and "einsum" not in counter.operations


def test_every_path_is_counted_at_every_batch_size():
    counted = list(count.count_launches(Setting(160, local_window=16)))
    assert {(row.phase, row.routing, row.path) for row in counted} == {
        ("prefill", "shared", "grouped, torch-flash"),
        ("prefill", "shared", "grouped, cpu-flash"),
        ("prefill", "shared", "masked, any"),
        ("prefill", "cells", "native, any"),
        ("prefill", "cells", "masked, any"),
        *(("decode", routing, f"{path}, any") for routing in ("shared", "cells") for path in ("native", "masked")),
    }
    for row in counted:
        assert list(row.focus) == list(row.dense) == list(row.syncs) == [1, 2, 8]
        assert len(set(row.dense.values())) == 1 and row.dense[1] >= 20
        assert row.focus[1] >= row.dense[1]
        assert sum(row.waits_for.values()) == row.syncs[8]
        assert cells(row)[:2] == [row.phase, "160"]


@pytest.mark.parametrize("top_k", [1, 2])
def test_what_is_the_same_for_any_batch_and_at_any_step(top_k):
    """Under masks nothing is read back, and a token of a larger batch launches no more operations."""
    for counted in count.count_launches(Setting(96, top_k=top_k, local_window=16), batches=(2, 8)):
        if counted.path.startswith("masked"):
            assert set(counted.syncs.values()) == {0}, counted.waits_for
        if counted.phase == "decode":
            assert counted.focus[2] == counted.focus[8]


@torch.no_grad()
@pytest.mark.parametrize("routing", ["shared", "cells"])
def test_every_decoded_token_launches_the_same_operations(routing):
    """In a static cache; in one that grows, one token in a window and one finds the groups of all in it."""
    setting = Setting(96, local_window=16)
    model = count._model(setting, routing)
    ids, tokens = torch.zeros(1, 96, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long)
    for past in (StaticCache(config=model.config, max_cache_len=160), DynamicCache(config=model.config)):
        totals = []
        for new in (ids, *[tokens] * 41):

            def step(new=new, past=past):
                return model(input_ids=new, past_key_values=past, use_cache=True)

            totals.append(count._count(model, step).operations.total())
        several = totals[1:]  # tokens by themselves
        if routing == "cells" and isinstance(past, DynamicCache):
            assert several[18] > several[17] and several[36] == several[18]
            del several[::18]
        elif isinstance(past, DynamicCache):
            del several[0]  # room is made
        assert len(set(several)) == 1, totals
