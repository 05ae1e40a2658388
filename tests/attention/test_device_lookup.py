"""Queries that read other groups than they belong to, planned on the device, and the Triton kernel that it needs."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from focus_hf.attention import Known, Pattern, Problem, Scores, WhoAttends, attended_pairs, heads, masked_attention
from focus_hf.attention.device_lookup import device_lookup_attention
from focus_hf.bench import LaunchCounter
from focus_hf.bench.stand_in import FlashStandIn
from tests.attention.test_exactness import packed, random_case
from tests.attention.triton_apart import run_apart

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@torch.library.custom_op("focus_hf_tests::lookup", mutates_args=())
def lookup_in_loops(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    asking: torch.Tensor,
    limits: torch.Tensor,
    keys: torch.Tensor,
    firsts: torch.Tensor,
    stops: torch.Tensor,
    lists: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel, in blocks of four."""
    return lookup_by_reader(query, key, value, asking, limits, keys, firsts, stops, lists, scale, block=4)


def lookup_by_reader(query, key, value, asking, limits, keys, firsts, stops, lists, scale, block):
    """What the kernel computes, reader by reader; anything (NaN) where it writes nothing."""
    output = query.new_full((asking.shape[0], *query.shape[1:]), float("nan"))
    lse = query.new_full(output.shape[:2], float("nan"))
    repeat = query.shape[1] // key.shape[1]
    for first, stop, begin in zip(firsts.tolist(), stops.tolist(), lists.tolist(), strict=True):
        for reader in range(first, min(first + block, stop)):
            assert lse[reader].isnan().all()  # no reader is in two blocks
            seen = keys[begin : begin + int(limits[reader])]
            k, v = (x[seen].repeat_interleave(repeat, dim=1) for x in (key, value))
            scores = torch.einsum("hd,shd->hs", query[asking[reader]], k) * scale
            lse[reader] = scores.logsumexp(dim=-1)  # of nothing: -inf, and a sum of 0
            output[reader] = torch.einsum("hs,shd->hd", scores.softmax(dim=-1), v)
    return output, lse


@lookup_in_loops.register_fake
def _(query, key, value, asking, *_):
    shape = (asking.shape[0], *query.shape[1:])
    return query.new_empty(shape), query.new_empty(shape[:2])


def loops(query, key, value, asking, limits, keys, blocks, scale):
    return lookup_in_loops(query, key, value, asking, limits, keys, *blocks, scale)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 100_000),
    batch=st.integers(1, 3),
    length=st.integers(1, 60),
    groups=st.integers(1, 5),
    window=st.integers(0, 20),
    sinks=st.integers(0, 4),
    dense_below=st.sampled_from([0, 0, 5, 30]),
    padding=st.sampled_from(["none", "left", "scattered"]),
    documents=st.booleans(),
    logits=st.booleans(),
    data=st.data(),
)
def test_it_equals_the_definition(
    seed, batch, length, groups, window, sinks, dense_below, padding, documents, logits, data
):
    query, key, value, positions, memberships = random_case(
        seed, batch=batch, heads=4, kv_heads=2, length=length, head_dim=8, value_dim=8, groups=groups, top_k=1,
        padding=padding,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    reads_each = data.draw(st.integers(1, groups))
    reads = torch.rand(batch, length, groups, generator=generator).argsort(-1) < reads_each
    of_document, most = None, 1
    if documents:
        positions, of_document = packed(positions, generator)
        most = max(1, int((positions == 0).sum(dim=-1).max()))
    chunk = data.draw(st.integers(1, length))
    known = Known(1, most, unpadded=padding == "none", reads_each=reads_each)
    who = WhoAttends(
        Pattern(window, sinks, dense_below), positions, memberships, of_document, reads=reads, known=known
    )
    scores = Scores(0.35, sink_logits=torch.randn(4, generator=generator).double() if logits else None)
    problem = Problem(query[:, :, length - chunk :].double(), key.double(), value.double(), who, scores)
    mask = attended_pairs(who, slice(length - chunk, None))
    expected = masked_attention(problem.query, problem.key, problem.value, mask, scores)
    output = device_lookup_attention(problem, FlashStandIn(), loops, block=4)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-10)


def a_problem(batch):
    memberships, reads = (torch.rand(batch, 50, 4).argsort(-1) < k for k in (1, 2))
    known = Known(1, unpadded=True, reads_each=2)
    who = WhoAttends(Pattern(6, 2), torch.arange(50).expand(batch, -1), memberships, reads=reads, known=known)
    query, key, value = (torch.randn(batch, heads, 50, 8) for heads in (4, 2, 2))
    return Problem(query, key, value, who, Scores(0.3))


def test_nothing_depends_on_data_or_grows_with_the_batch():
    with FakeTensorMode():
        assert device_lookup_attention(a_problem(2), FlashStandIn(), loops, block=4).shape == (2, 4, 50, 8)
    counts = []
    for batch in (2, 5):
        problem = a_problem(batch)
        with LaunchCounter() as counter:
            device_lookup_attention(problem, FlashStandIn(), loops, block=4)
        assert not counter.syncs
        counts.append(counter.operations.total())
    assert counts[0] == counts[1]


def test_heads_that_are_alike_take_at_most_three_times_the_operations_of_a_dense_layer(monkeypatch):
    """As `attend_by_class` calls it on CUDA. A dense layer has 36: `focus-hf bench --what launches`."""
    monkeypatch.setattr(
        heads, "focus_attention", lambda problem, **_: device_lookup_attention(problem, FlashStandIn(), loops, block=4)
    )
    memberships, reads = (torch.cat([torch.rand(3, 50, 4).argsort(-1) < k] * 2, dim=-1) for k in (1, 2))
    who = WhoAttends(
        Pattern(6, 2), torch.arange(50).expand(3, -1), memberships, reads=reads, known=Known(1, unpadded=True)
    )
    query, key, value = (torch.randn(3, count, 50, 8) for count in (4, 2, 2))
    problem = Problem(query, key, value, who, Scores(0.3))
    alike = heads.HeadClass((0, 1), Pattern(6, 2), (slice(0, 4), slice(4, 8)), top_k=2)
    with LaunchCounter() as counter:
        heads.attend_by_class(problem, [alike])
    assert counter.operations["lookup"] == 1 and counter.operations["varlen_stand_in"] == 3
    assert counter.operations.total() <= 3 * 36


#: Run apart: Triton looks at TRITON_INTERPRET when a kernel is defined.
INTERPRETED = """
import json
import torch
from focus_hf.attention.kernels.triton_lookup import BLOCK_QUERIES, lookup_forward
from tests.attention.test_device_lookup import made_up

worst = {}
for heads, kv_heads, dim, dtype in (
    (4, 2, 8, torch.float32), (2, 2, 24, torch.float32), (3, 1, 64, torch.float32), (2, 1, 16, torch.float16)
):
    tensors, plan, expected = made_up(heads, kv_heads, dim, dtype, BLOCK_QUERIES)
    output, lse = lookup_forward(*tensors, *plan, 0.3)
    seen = expected[1].isfinite()
    assert torch.equal(lse.isfinite(), seen) and not output[~seen].any()
    error = max((output.double() - expected[0]).abs().max(), (lse.double() - expected[1])[seen].abs().max())
    worst[f"{heads}/{kv_heads} heads of {dim}, {dtype}"] = float(error)
print(json.dumps(worst))
"""

#: What engines that serve many requests in one call (continuous batching, vLLM) ask for on CUDA, here on a CPU: their
#: prompts by the interpreted kernel, in the place of the path that a CPU takes.
PACKED = """
import json
import torch
from focus_hf.adapter.attend_packed import attend_packed
from focus_hf.adapter.call import Routing, groups_each
from focus_hf.adapter.packed import Packed
from focus_hf.attention import HeadClass, Pattern, Scores, heads
from focus_hf.attention.device_lookup import device_lookup_attention, fits_lookup
from focus_hf.attention.kernels.triton_lookup import BLOCK_QUERIES, lookup_forward
from focus_hf.bench.stand_in import FlashStandIn

torch.manual_seed(0)
new, kv_heads, K = 30 + 1 + 50, 2, 4
# A prompt of 30, one token after 19 cached ones, a prompt of 50; the last rows are nobody's.
rows = torch.cat([torch.arange(30), torch.arange(40, 60), torch.arange(70, 120)])
packed = Packed(rows, [0, 30, 31, 81], [0, 30, 50, 100])
query, key, value = (torch.randn(1, h, new, 16) for h in (4, kv_heads, kv_heads))
keys, values = torch.randn(130, kv_heads, 16), torch.randn(130, kv_heads, 16)
for asking, rows in ((slice(0, 30), slice(0, 30)), (slice(30, 31), slice(59, 60)), (slice(31, 81), slice(70, 120))):
    keys[rows], values[rows] = key[0, :, asking].transpose(0, 1), value[0, :, asking].transpose(0, 1)
def some(n, k):
    chosen = torch.rand(n, kv_heads, K).topk(k).indices
    return torch.zeros(n, kv_heads, K, dtype=torch.bool).scatter_(-1, chosen, True).flatten(1)
memberships, reads = some(100, 1), some(new, 2)
classes = (HeadClass((0, 1), Pattern(5, 2), (slice(0, K), slice(K, 2 * K)), top_k=2),)
how = Routing(Pattern(5, 2), memberships, 2, classes=classes, reads=reads, groups_each=groups_each(2, classes, reads))
tensors = how, packed, (query, key, value), (keys, values), Scores(0.25)
expected = attend_packed(*tensors)

asked = []
def on_cuda(problem, *, path, kernel):
    asked.append(fits_lookup(problem.who) and problem.num_queries)
    return device_lookup_attention(problem, FlashStandIn(), lookup_forward, BLOCK_QUERIES)
heads.focus_attention = on_cuda
print(json.dumps([asked, float((attend_packed(*tensors) - expected).abs().max())]))
"""

#: Compiled for GPUs that are not here: no registers may be spilled.
COMPILED = """
import json
from focus_hf.attention.kernels import triton_lookup
from tests.attention.triton_apart import usage

constants = {"HEAD_DIM": 128, "WIDTH": 128, "QUERIES": triton_lookup.BLOCK_QUERIES, "KEYS": triton_lookup.BLOCK_KEYS}
constants["LOWEST"] = -1e30
types = dict.fromkeys(("query", "key", "value", "output"), "*bf16") | {"lse": "*fp32", "scale": "fp32"}
types |= dict.fromkeys(("asking", "limits", "keys", "block_first", "block_stop", "block_list"), "*i64")
print(json.dumps(usage(triton_lookup._lookup, constants, types, triton_lookup.WARPS)))
"""


def made_up(heads, kv_heads, dim, dtype, block):
    """Tensors, lists of keys with their readers, one of them empty, and what must come out, in float64."""
    torch.manual_seed(0)
    tensors = [torch.randn(n, h, dim).to(dtype) for n, h in ((30, heads), (40, kv_heads), (40, kv_heads))]
    lists = [torch.randperm(40)[:n] for n in (13, 0, 27)]
    readers = [torch.randint(0, 30, (n,)) for n in (block + 6, 5, 20)]
    limits = [torch.randint(0, len(a) + 1, (len(b),)).sort().values for a, b in zip(lists, readers, strict=True)]
    blocks, begin, start = [], 0, 0
    for some, asking in zip(lists, readers, strict=True):
        stop = start + len(asking)
        blocks += [(first, stop, begin) for first in range(start, stop, block)]
        begin, start = begin + len(some), stop
    blocks.append((start, start, 0))  # an empty one
    plan = torch.cat(readers), torch.cat(limits), torch.cat(lists), tuple(torch.tensor(blocks).T.contiguous())
    doubles = [x.double() for x in tensors]
    return tensors, plan, lookup_by_reader(*doubles, *plan[:3], *plan[3], 0.3, block)


@needs_triton
def test_the_kernel_in_the_interpreter():
    for case, error in run_apart(INTERPRETED, TRITON_INTERPRET="1").items():
        assert error < (2e-3 if "float16" in case else 2e-6), case


@needs_triton
def test_prompts_of_a_packed_call_in_the_interpreter():
    asked, error = run_apart(PACKED, TRITON_INTERPRET="1")
    assert asked == [30, 50] and error < 2e-6


@needs_triton
def test_the_kernel_compiles_for_gpus_that_are_not_here():
    for target, found in run_apart(COMPILED).items():
        assert found["registers"] <= 255 and found["shared"] <= 96 * 1024 and not found["spilled"], (target, found)
