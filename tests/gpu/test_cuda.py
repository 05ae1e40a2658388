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
    GroupedStore,
    Known,
    Pattern,
    Problem,
    Scores,
    WhoAttends,
    attend_store,
    attended_pairs,
    gated_attention,
    grouped_focus_attention,
    masked_attention,
)
from focus_hf.bench import Setting, bench_attention, bench_decode
from tests.families import FAMILIES, focus_model, logits, token_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

cuda_kernels = pytest.mark.parametrize(
    "kernel", [k for k in KERNELS if k.name not in ("cpu-flash",)], ids=lambda k: k.name
)


def usable(kernel, query, value):
    if kernel.only_when_named or kernel.missing() or kernel.unsupported(query, value):
        pytest.skip(f"{kernel.name}: {kernel.missing() or kernel.unsupported(query, value) or 'only when named'}")
    return kernel


def call(dtype, *, batch=2, heads=8, kv_heads=2, length=700, head_dim=64, groups=8, top_k=1, padding=False):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(batch, heads, length, head_dim, generator=generator)
    key, value = (torch.randn(batch, kv_heads, length, head_dim, generator=generator) for _ in range(2))
    memberships = torch.rand(batch, length, groups, generator=generator).argsort(-1) < top_k
    real = torch.ones(batch, length, dtype=torch.bool)
    if padding:
        real[0, : length // 3] = False
    positions = torch.where(real, real.cumsum(-1) - 1, PADDING)
    tensors = [x.to("cuda", dtype) for x in (query, key, value)]
    return *tensors, positions.cuda(), memberships.cuda()


def reference(query, key, value, pattern, positions, memberships, scale):
    mask = attended_pairs(WhoAttends(pattern, positions, memberships), slice(-query.shape[2], None))
    return masked_attention(query.double(), key.double(), value.double(), mask, Scores(scale))


@cuda_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("told", [False, True])
def test_at_most_twice_the_dense_kernels_error(kernel, dtype, top_k, padding, told):
    """With a plan made by the host, and, where the host is told enough, on the device."""
    query, key, value, positions, memberships = call(dtype, top_k=top_k, padding=padding)
    usable(kernel, query, value)
    pattern, scale = Pattern(64, 4), 64**-0.5
    everything = torch.ones_like(memberships)
    dense = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    positions_of_all = torch.arange(query.shape[2], device="cuda").expand(2, -1)
    allowed = (dense.double() - reference(query, key, value, pattern, positions_of_all, everything, scale)).abs().max()
    known = Known(top_k, unpadded=not padding) if told else None
    problem = Problem(query, key, value, WhoAttends(pattern, positions, memberships, known=known), Scores(scale))
    output = grouped_focus_attention(problem, kernel)
    expected = reference(query, key, value, pattern, positions, memberships, scale)
    assert (output.double() - expected).abs().max() <= 2 * allowed
    chunk = grouped_focus_attention(replace(problem, query=query[:, :, 500:]), kernel)
    assert (chunk.double() - expected[:, :, 500:]).abs().max() <= 2 * allowed


@cuda_kernels
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("told", [False, True])
def test_gradients(kernel, top_k, told):
    query, key, value, positions, memberships = call(torch.bfloat16, top_k=top_k)
    usable(kernel, query, value)
    pattern, scale = Pattern(64, 4), 64**-0.5
    leaves = [x.requires_grad_() for x in (query, key, value)]
    grad = torch.randn_like(query)
    known = Known(top_k, unpadded=True) if told else None
    problem = Problem(*leaves, WhoAttends(pattern, positions, memberships, known=known), Scores(scale))
    output = grouped_focus_attention(problem, kernel)
    gradients = torch.autograd.grad(output, leaves, grad)
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    expected = reference(*doubles, pattern, positions, memberships, scale)
    for mine, wanted in zip(gradients, torch.autograd.grad(expected, doubles, grad.double()), strict=True):
        assert (mine.double() - wanted).abs().max() <= 0.03 * wanted.abs().max()


@pytest.mark.parametrize("gate", ["additive", "multiplicative"])
def test_gates_of_training(gate):
    query, key, value, positions, memberships = call(torch.bfloat16)
    assignments = torch.softmax(torch.randn(2, 700, 8, device="cuda") * 3, -1)
    problem = Problem(query, key, value, WhoAttends(Pattern(64, 4), positions, memberships), Scores(0.125))
    output = gated_attention(problem, assignments, gate=gate, strength=4.0)
    doubles = (x.double().cpu() for x in (query, key, value))
    on_cpu = Problem(*doubles, WhoAttends(Pattern(64, 4), positions.cpu(), memberships.cpu()), Scores(0.125))
    expected = gated_attention(on_cpu, assignments.double().cpu(), gate=gate, strength=4.0)
    assert (output.double().cpu() - expected).abs().max() <= 0.05 * expected.abs().max()


@cuda_kernels
@pytest.mark.parametrize("device_tokens", [None, 192, 6400])
def test_decoding(kernel, device_tokens):
    """The cache on the device, or in pinned memory of which the device has a part, less than a step reads or all."""
    query, key, value, positions, memberships = call(torch.bfloat16, batch=3, top_k=2)
    usable(kernel, query, value)
    pattern, scale = Pattern(64, 4), 64**-0.5
    expected = reference(query, key, value, pattern, positions, memberships, scale)
    store = GroupedStore(pattern, 8, 2, (key, value), device_tokens)
    store.append(key[:, :, :600], value[:, :, :600], store.pack(memberships[:, :600]), positions[:, :600], 2)
    for start, stop in ((600, 601), (601, 640), (640, 641)):  # by the paged kernel, and under a mask
        new = slice(start, stop)
        tensors = (x[:, :, new] for x in (query, key, value))
        output = attend_store(store, *tensors, positions[:, :stop], memberships[:, new], Scores(scale), kernel, 2)
        assert (output.double() - expected[:, :, new]).abs().max() <= 0.02
    if device_tokens is not None:
        pool = store.pool
        assert pool.host_keys.is_pinned() and pool.host_values.is_pinned() and pool.keys.is_cuda


@cuda_kernels
@pytest.mark.parametrize("top_k", [1, 2])
def test_a_cuda_graph_records_it(kernel, top_k):
    """Nothing is read back and every shape is known: what is recorded is right for other data, too."""
    query, key, value, positions, memberships = call(torch.bfloat16, top_k=top_k)
    usable(kernel, query, value)
    who = WhoAttends(Pattern(64, 4), positions, memberships, known=Known(top_k, unpadded=True))
    problem = Problem(query, key, value, who, Scores(0.125))
    grouped_focus_attention(problem, kernel)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = grouped_focus_attention(problem, kernel)
    memberships.copy_(memberships.roll(1, dims=1))
    graph.replay()
    torch.testing.assert_close(output, grouped_focus_attention(problem, kernel))


@pytest.mark.parametrize("family", FAMILIES)
def test_models(family):
    """The same logits as on CPU, and decoding equals prefill."""
    model, ids = focus_model(family), token_ids(length=48)
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
