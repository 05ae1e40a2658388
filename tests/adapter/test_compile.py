"""torch.compile: one graph, the same logits."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from focus_hf.adapter import focus_layers
from focus_hf.attention import EVERYTHING, HeadClass, Pattern, write_classes
from focus_hf.bench.stand_in import FlashStandIn
from tests.families import FAMILIES, focus_model, logits, token_ids


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padded", [False, True])
def test_a_prefill_is_one_graph(family, padded):
    model, ids = focus_model(family, top_k=2).base_model.model, token_ids(length=48)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    kwargs = {"use_cache": False, **({"attention_mask": mask} if padded else {})}
    expected = logits(model, ids, **kwargs)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    result = logits(compiled, ids, **kwargs)
    real = mask.bool() if padded else torch.ones_like(mask, dtype=torch.bool)
    torch.testing.assert_close(result[real], expected[real])


def test_a_step_of_decoding_is_one_graph():
    model, ids = focus_model("llama").base_model.model, token_ids(length=48)
    expected = logits(model, ids, use_cache=False)[:, -1:]
    cache = DynamicCache(config=model.config)
    logits(model, ids[:, :47], past_key_values=cache, use_cache=True)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    result = logits(compiled, ids[:, 47:], past_key_values=cache, use_cache=True)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_the_operation_keeps_its_contract():
    """Schema, fake tensors and aliasing, as torch.library checks them."""
    query, key, value = (torch.randn(2, 4, 40, 8) for _ in range(3))
    memberships = torch.rand(2, 40, 4).argsort(-1) < 1
    mask = torch.ones(2, 40, dtype=torch.long)
    reads = torch.rand(2, 40, 4).argsort(-1) < 2
    classes = write_classes(
        [HeadClass((0, 2, 3), Pattern(6, 2), (slice(0, 4),)), HeadClass((1,), Pattern(3, 2, EVERYTHING))]
    )
    options = (6, 2, 0, 0.3, None, 0.0, False, "auto", "cpu-flash")
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    with torch.no_grad():
        for how in (
            (None, None, None, *options, []),
            (reads, None, None, *options, classes),
            (None, None, torch.randn(2, 4, 40, 40), *options, []),
        ):
            arguments = (query, key, value, mask, memberships, *how)
            torch.library.opcheck(torch.ops.focus_hf.hard_attention.default, arguments, test_utils=tests)


@pytest.mark.parametrize("padded", [False, True])
def test_on_kernels_that_take_many_rows_nothing_is_opaque(padded):
    """As on CUDA: with masks that need not be read, the graph holds the kernel's calls and what surrounds them."""
    model, ids = focus_model("llama", top_k=2).base_model.model, token_ids(length=48)
    model.set_attn_implementation("focus")
    mask = torch.ones_like(ids)
    mask[0, : 9 if padded else 0] = 0
    expected = logits(model, ids, attention_mask=mask, use_cache=False)
    for layer in focus_layers(model):
        layer.path, layer.kernel = "grouped", FlashStandIn()
    targets: list[str] = []

    def recording(module, inputs):
        targets.extend(str(node.target) for node in module.graph.nodes)
        return module.forward

    compiled = torch.compile(model, backend=recording, fullgraph=True)
    result = logits(compiled, ids, attention_mask=mask, use_cache=False)
    torch.testing.assert_close(result[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4)
    assert any("varlen_stand_in" in target for target in targets)
    assert not any("hard_attention" in target for target in targets)
