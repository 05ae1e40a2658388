"""torch.compile: one graph, the same logits."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, StaticCache

from focus_hf.attention import by_memberships
from tests.families import CELLS, FAMILIES, focus_model, logits, token_ids

ROUTINGS = pytest.mark.parametrize("changes", [{"top_k": 2}, CELLS], ids=["shared", "cells"])


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padded", [pytest.param(False, marks=pytest.mark.slow), True])
@ROUTINGS
def test_a_prefill_is_one_graph(family, padded, changes):
    model, ids = focus_model(family, **changes).base_model.model, token_ids(length=48)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    kwargs = {"use_cache": False, **({"attention_mask": mask} if padded else {})}
    expected = logits(model, ids, **kwargs)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    result = logits(compiled, ids, **kwargs)
    real = mask.bool() if padded else torch.ones_like(mask, dtype=torch.bool)
    torch.testing.assert_close(result[real], expected[real])


@ROUTINGS
@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
def test_a_step_of_decoding_is_one_graph(changes, cache_class):
    model, ids = focus_model("llama", **changes).base_model.model, token_ids(length=48)
    expected = logits(model, ids, use_cache=False)[:, -1:]
    cache = DynamicCache(config=model.config)
    if cache_class is StaticCache:
        cache = StaticCache(config=model.config, max_cache_len=64)
    logits(model, ids[:, :47], past_key_values=cache, use_cache=True)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    result = logits(compiled, ids[:, 47:], past_key_values=cache, use_cache=True)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_the_operation_keeps_its_contract():
    """Schema, fake tensors and aliasing, as torch.library checks them."""
    query, key, value = torch.randn(2, 4, 40, 8), torch.randn(2, 2, 40, 8), torch.randn(2, 2, 40, 8)
    memberships = torch.rand(2, 40, 4).argsort(-1) < 1
    shared = (*by_memberships(memberships, 40), memberships)
    cells = (torch.randint(0, 4, (2, 2, 40), dtype=torch.uint8), torch.rand(2, 2, 40, 4, 3) < 0.3, None)
    mask = torch.ones(2, 40, dtype=torch.long)
    options = (6, 2, 0, 0.3, None, 0.0, 0, False, "auto", "cpu-flash")
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    with torch.no_grad():
        for routed in (shared, cells):
            for bias in (None, torch.randn(2, 4, 40, 40)):
                arguments = (query, key, value, mask, *routed, None, bias, *options)
                torch.library.opcheck(torch.ops.focus_hf.hard_attention.default, arguments, test_utils=tests)
