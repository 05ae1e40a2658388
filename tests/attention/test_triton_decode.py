"""The Triton kernel of decoding: interpreted, against the definition; compiled, for GPUs that are not here."""

from __future__ import annotations

import importlib.util

import pytest

from tests.attention.triton_apart import run_apart

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

#: Run apart: Triton looks at TRITON_INTERPRET when a kernel is defined.
INTERPRETED = """
import itertools
import json
import torch
from focus_hf.attention import GroupedStore, HeadRow, Pattern, Scores, WhoAttends
from focus_hf.attention import attend_store, attended_pairs, masked_attention, store
from focus_hf.attention.kernels import triton_decode
from focus_hf.bench.stand_in import FlashStandIn

store.PAGE, store.SLACK, triton_decode.SPLITS = 16, 3, 4


class WithTriton(FlashStandIn):
    paged = staticmethod(triton_decode.paged_forward)


worst, generator = {}, torch.Generator().manual_seed(0)
for top_k, dtype, dim, (heads, kv_heads), batch, dense_below in (
    *itertools.product((1, 2), (torch.float32, torch.float16), (64, 128), ((4, 2),), (1, 3), (0,)),
    (1, torch.float32, 24, (3, 1), 2, 0),
    (2, torch.float32, 8, (2, 2), 2, 500),
):
    length, last = 150, 149
    query, key, value = (
        torch.randn(batch, h, length, dim, generator=generator).to(dtype) for h in (heads, kv_heads, kv_heads)
    )
    memberships = torch.rand(batch, length, 5, generator=generator).argsort(-1) < top_k
    positions = torch.arange(length).repeat(batch, 1)
    if batch > 1:  # rows of different lengths; one asks nothing
        positions[1] = (positions[1] - 90).clamp(min=-1)
        positions[-1, last] = -1
    pattern, scores = Pattern(20, 2, dense_below), Scores(0.3)
    cache = GroupedStore(pattern, 5, top_k, like=(key, value))
    old, new = slice(0, last), slice(last, length)
    cache.append(key[:, :, old], value[:, :, old], cache.pack(memberships[:, old]), positions[:, old], top_k)
    one = query[:, :, new], key[:, :, new], value[:, :, new]
    output = attend_store(cache, *one, positions, memberships[:, new], scores, WithTriton(), top_k)
    pairs = attended_pairs(WhoAttends(pattern, positions, memberships), new)
    expected = masked_attention(query[:, :, new].double(), key.double(), value.double(), pairs, scores)
    case = f"k={top_k}, {dtype}, {heads}/{kv_heads} heads of {dim}, batch {batch}, dense below {dense_below}"
    worst[case] = float((output.double() - expected).abs().max())
    assert output.dtype == dtype and (batch == 1 or not output[-1].any())

for dtype in (torch.float32, torch.float16):  # heads that are rows: groups of its own, a window only, everything
    batch, heads, kv_heads, dim, length, last = 2, 6, 3, 16, 150, 149
    query, key, value = (
        torch.randn(batch, h, length, dim, generator=generator).to(dtype) for h in (heads, kv_heads, kv_heads)
    )
    members, reads = (torch.rand(batch * 3, length, 5, generator=generator).argsort(-1) < k for k in (1, 2))
    for x in (members, reads):
        x[1::3], x[2::3] = False, True
    positions = torch.arange(length).repeat(batch, 1)
    positions[1] = (positions[1] - 90).clamp(min=-1)
    rows = HeadRow(20), HeadRow(9, forgets=True), HeadRow(0, everything=True)
    pattern, scores, old, new = Pattern(20, 2, 0), Scores(0.3), slice(0, last), slice(last, length)
    k, v = (x.flatten(0, 1)[:, None] for x in (key, value))
    cache = GroupedStore(pattern, 5, 1, like=(k, v), heads=rows)
    cache.append(k[:, :, old], v[:, :, old], cache.pack(members[:, old]), positions[:, old], 1)
    one = query[:, :, new], key[:, :, new], value[:, :, new]
    output = attend_store(cache, *one, positions, members[:, new], scores, WithTriton(), 1, reads[:, new])
    for head, row in enumerate(rows):
        who = WhoAttends(Pattern(row.local_window, 2), positions, members[head::3], reads=reads[head::3])
        of = slice(2 * head, 2 * head + 2)
        expected = masked_attention(
            *(x.double() for x in (query[:, of, new], key[:, head][:, None], value[:, head][:, None])),
            attended_pairs(who, new), scores,
        )
        worst[f"{dtype}, head {head}"] = float((output[:, of].double() - expected).abs().max())
print(json.dumps(worst))
"""

COMPILED = """
import json
from focus_hf.attention.kernels import triton_decode
from focus_hf.attention.store import PAGE
from tests.attention.triton_apart import usage

found = {}
for dim in (64, 128):
    constants = {"HEADS": 4, "ROWS": 16, "HEAD_DIM": dim, "WIDTH": dim}
    constants |= {"PAGE": PAGE, "TILE": triton_decode.keys_of_tile(dim), "LOWEST": -1e30}
    constants["SPLITS"] = triton_decode.SPLITS
    tensors = ("query", "recent_key", "recent_value", "pool_key", "pool_value")
    types = dict.fromkeys(tensors, "*bf16") | dict.fromkeys(("output", "lse"), "*fp32")
    types |= dict.fromkeys(("visible", "reads"), "*i1") | dict.fromkeys(("lengths", "tables", "places"), "*i64")
    types["scale"] = "fp32"
    for target, used in usage(triton_decode._paged, constants, types, triton_decode.WARPS).items():
        found[f"{dim}, {target}"] = used
print(json.dumps(found))
"""


def test_it_equals_the_definition_in_the_interpreter():
    for case, error in run_apart(INTERPRETED, TRITON_INTERPRET="1").items():
        assert error < (2e-3 if "float16" in case else 5e-6), (case, error)


def test_it_compiles_for_gpus_that_are_not_here():
    for target, found in run_apart(COMPILED).items():
        assert found["registers"] <= 255 and found["shared"] <= 96 * 1024 and not found["spilled"], (target, found)
