"""What only a GPU can show: the CUDA backends against the definition. Skipped where there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import focus_hf
from focus_hf.attention import (
    KERNELS,
    PADDING,
    Pattern,
    Problem,
    Scores,
    WhoAttends,
    by_memberships,
    focus_attention,
    gated_attention,
    masked_focus_attention,
)
from focus_hf.attention.on_device import device_focus_attention, fits_device
from focus_hf.attention.prompt import grouped_focus_attention
from focus_hf.bench import Setting, bench_attention, bench_decode
from tests.families import FAMILIES, ROUTINGS, focus_model, logits, token_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

cuda_kernels = pytest.mark.parametrize(
    "kernel", [k for k in KERNELS if k.name not in ("cpu-flash",)], ids=lambda k: k.name
)


def usable(kernel, query, value):
    if kernel.missing() or kernel.unsupported(query, value):
        pytest.skip(f"{kernel.name}: {kernel.missing() or kernel.unsupported(query, value)}")
    return kernel


def problem(dtype=torch.bfloat16, *, routing="shared", new=700, padding=False, top_k=1, groups=8):
    """Two sequences of 700 tokens, of which the last ``new`` are queries; eight query heads over two key heads."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 8, new, 64, generator=generator)
    key, value = (torch.randn(2, 2, 700, 64, generator=generator) for _ in range(2))
    real = torch.ones(2, 700, dtype=torch.bool)
    if padding:
        real[0, :233] = False
    positions, bands = torch.where(real, real.cumsum(-1) - 1, PADDING), 1
    if routing == "shared":
        memberships = torch.rand(2, 700, groups, generator=generator).argsort(-1) < top_k
        of_keys, reads = by_memberships(memberships, new)
        of_keys, reads = of_keys.expand(-1, 2, -1), reads.expand(-1, 2, -1, -1, -1)
    else:
        memberships, bands = None, 3
        of_keys = torch.randint(0, groups, (2, 2, 700), generator=generator).to(torch.uint8)
        reads = torch.rand(2, 2, new, groups, bands, generator=generator) < 0.2
    first = None if padding else 0
    who = WhoAttends(
        Pattern(64, 4, 0, bands), positions, of_keys, reads, first_position=first, memberships=memberships
    )
    return on(Problem(query.to(dtype), key.to(dtype), value.to(dtype), who, Scores(0.125)), "cuda")


def on(some, device, dtype=None):
    """A problem on a device."""
    who = some.who
    tensors = {name: x.to(device) for name, x in vars(who).items() if isinstance(x, torch.Tensor)}
    q, k, v = (x.to(device, dtype or x.dtype) for x in (some.query, some.key, some.value))
    return Problem(q, k, v, replace(who, **tensors), some.scores)


def expected_of(some):
    return masked_focus_attention(on(some, "cpu", torch.float64))


def allowed_error(dtype):
    """Twice the dense kernel's own."""
    some = problem(dtype)
    dense = F.scaled_dot_product_attention(some.query, some.key, some.value, is_causal=True, enable_gqa=True)
    doubles = [x.double() for x in (some.query, some.key, some.value)]
    exact = F.scaled_dot_product_attention(*doubles, is_causal=True, enable_gqa=True)
    return 2 * (dense.double() - exact).abs().max().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("routing", ["shared", "cells"])
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("new", [1, 5, 700, 130])
def test_our_kernels(dtype, routing, padding, new):
    some = problem(dtype, routing=routing, padding=padding, new=new)
    assert fits_device(some)
    output = focus_attention(some)
    assert (output.double().cpu() - expected_of(some)).abs().max() <= allowed_error(dtype)


@cuda_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("padding", [False, True])
def test_the_papers_two_calls(kernel, dtype, top_k, padding):
    some = problem(dtype, top_k=top_k, padding=padding)
    usable(kernel, some.query, some.value)
    output = grouped_focus_attention(some, kernel)
    assert (output.double().cpu() - expected_of(some)).abs().max() <= allowed_error(dtype)


@cuda_kernels
@pytest.mark.parametrize("top_k", [1, 2])
def test_gradients(kernel, top_k):
    some = problem(top_k=top_k)
    usable(kernel, some.query, some.value)
    leaves = [x.requires_grad_() for x in (some.query, some.key, some.value)]
    grad = torch.randn_like(some.query)
    gradients = torch.autograd.grad(grouped_focus_attention(some, kernel), leaves, grad)
    exact = on(some, "cpu", torch.float64)
    doubles = [x.detach().requires_grad_() for x in (exact.query, exact.key, exact.value)]
    expected = masked_focus_attention(Problem(*doubles, exact.who, exact.scores))
    for mine, wanted in zip(gradients, torch.autograd.grad(expected, doubles, grad.double().cpu()), strict=True):
        assert (mine.double().cpu() - wanted).abs().max() <= 0.03 * wanted.abs().max()


@pytest.mark.parametrize("gate", ["additive", "multiplicative"])
def test_gates_of_training(gate):
    some = problem()
    assignments = torch.softmax(torch.randn(2, 700, 8, device="cuda") * 3, -1)
    output = gated_attention(some, assignments, gate=gate, strength=4.0)
    exact = on(some, "cpu", torch.float64)
    expected = gated_attention(exact, assignments.double().cpu(), gate=gate, strength=4.0)
    assert (output.double().cpu() - expected).abs().max() <= 0.05 * expected.abs().max()


@pytest.mark.parametrize("new", [1, 700])
def test_a_cuda_graph_records_it(new):
    """Nothing is read back and every shape is known: what is recorded is right for other data, too."""
    some = problem(routing="cells", new=new)
    device_focus_attention(some)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = device_focus_attention(some)
    some.who.key_groups.copy_(some.who.key_groups.roll(1, dims=2))
    graph.replay()
    torch.testing.assert_close(output, device_focus_attention(some))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_models(family, routing):
    """The same logits as on CPU."""
    model, ids = focus_model(family, **ROUTINGS[routing]), token_ids(length=48)
    expected = logits(model, ids)
    model.to("cuda")
    result = logits(model, ids.cuda())
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-3, atol=2e-3)
    focus_hf.set_routing(model, path="masked")
    torch.testing.assert_close(logits(model, ids.cuda()), result, rtol=1e-3, atol=2e-3)


def test_the_benchmark_runs_and_names_its_baseline():
    setting = Setting(4096, dtype="bfloat16", device="cuda")
    measured = bench_attention(setting, seconds=0.2)
    assert measured.ratio > 0 and "SDPA" in measured.baseline
    assert bench_decode(setting, seconds=0.2).ratio > 0
