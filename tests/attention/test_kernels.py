"""The backends: each against the protocol spelled out, and against the calls it makes of other libraries."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from focus_hf.attention import KERNELS, Pattern, Problem, Scores, find_kernel, kernel_named
from focus_hf.attention.kernels import Call, Reference, Rows, flash
from focus_hf.attention.kernels.flash import TorchFlash
from focus_hf.attention.prompt import grouped_focus_attention
from tests.attention.cases import shared_who

rows_of_calls = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=4)


def make_call(data, rows, *, exclude, dtype=torch.float64, head_dim=16):
    """A call of several rows, each of ``(queries, earlier keys)``, with its tensors."""
    query_offsets, key_offsets = [0], [0]
    for queries, earlier in rows:
        query_offsets.append(query_offsets[-1] + queries)
        key_offsets.append(key_offsets[-1] + queries + earlier)
    seed = torch.Generator().manual_seed(data.draw(st.integers(0, 10_000)))
    query = torch.randn(query_offsets[-1], 4, head_dim, generator=seed, dtype=torch.float64).to(dtype)
    key, value = (torch.randn(key_offsets[-1], 2, head_dim, generator=seed, dtype=torch.float64) for _ in range(2))
    columns = None
    if exclude:
        columns = (
            torch.rand(query_offsets[-1], 3, generator=seed) < 0.2,
            torch.rand(key_offsets[-1], 3, generator=seed) < 0.2,
        )
        # Every query keeps itself: it is the last key but ``queries - 1 - m``.
        for (q, k), (queries, _) in zip(zip(query_offsets, key_offsets[1:], strict=False), rows, strict=True):
            columns[1][k - queries : k] &= ~columns[0][q : q + queries]
    window = data.draw(st.none() | st.integers(0, 20))
    offsets = Rows(tuple(query_offsets), tuple(key_offsets), query.device)
    return (query, key.to(dtype), value.to(dtype)), Call(offsets, head_dim**-0.5, window, columns)


def by_row(kernel, tensors, call):
    """Forward of a call by a kernel that takes one row at a time."""
    query, key, value = tensors
    outputs, lses = [], []
    for q, k in call.rows.lengths():
        exclude = None if call.exclude is None else (call.exclude[0][q], call.exclude[1][k])
        single = Rows.single(q.stop - q.start, k.stop - k.start, query.device)
        output, lse = kernel.forward(
            query[q], key[k], value[k], Call(single, call.scale, call.window, exclude, call.causal)
        )
        outputs.append(output)
        lses.append(lse)
    return torch.cat(outputs), torch.cat(lses)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), queries=st.integers(1, 90), earlier=st.integers(0, 60), exclude=st.booleans())
def test_the_cpu_kernel_keeps_the_protocol(data, queries, earlier, exclude):
    """Output, logsumexp, and the backward with the output and logsumexp of a larger attention."""
    tensors, call = make_call(data, [(queries, earlier)], exclude=exclude)
    if data.draw(st.booleans()) and call.window is None:
        call = Call(call.rows, call.scale, None, call.exclude, causal=False)
    cpu, reference = kernel_named("cpu-flash"), Reference()
    output, lse = cpu.forward(*tensors, call)
    expected, expected_lse = reference.forward(*tensors, call)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(lse, expected_lse)
    larger = expected_lse + torch.rand_like(expected_lse)
    other = expected + torch.randn_like(expected)
    grad = torch.randn_like(expected)
    for mine, wanted in zip(
        cpu.backward(grad, *tensors, other, larger, call),
        reference.backward(grad, *tensors, other, larger, call),
        strict=True,
    ):
        torch.testing.assert_close(mine, wanted)


def test_the_reference_backward_is_the_gradient_of_its_forward():
    torch.manual_seed(0)
    query = torch.randn(7, 4, 8, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(11, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    call = Call(Rows.single(7, 11, query.device), 0.3, window=5)
    output, lse = Reference().forward(query, key, value, call)
    grad = torch.randn_like(output)
    wanted = torch.autograd.grad(output, (query, key, value), grad)
    mine = Reference().backward(grad, query, key, value, output, lse, call)
    for a, b in zip(mine, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("top_k", [1, 3])
def test_the_reference_kernel_computes_the_grouped_path(top_k):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, 70, 8, dtype=torch.float64) for _ in range(3))
    memberships = torch.rand(2, 70, 5).argsort(-1) < top_k
    positions = torch.arange(70).expand(2, 70)
    problem = Problem(query, key, value, shared_who(Pattern(9, 3), positions, memberships, kv_heads=4), Scores(0.3))
    by_flash = grouped_focus_attention(problem, kernel_named("cpu-flash"))
    torch.testing.assert_close(grouped_focus_attention(problem, kernel_named("reference")), by_flash)


# -- FlashAttention's interface, played by the reference ------------------------------------------------------------


def check_offsets(offsets, longest, tokens):
    assert offsets.dtype == torch.int32 and offsets[0] == 0 and offsets[-1] == tokens
    assert longest == int(offsets.diff().max())


def as_rows(q, k, cu_q, cu_k, max_q, max_k, scale, causal, window):
    check_offsets(cu_q, max_q, q.shape[0])
    check_offsets(cu_k, max_k, k.shape[0])
    assert all(x.is_contiguous() and x.shape[-1] % 8 == 0 for x in (q, k))
    assert causal or window in ((-1, -1), (window[0], 0))
    for row in range(len(cu_q) - 1):
        some_q, some_k = slice(int(cu_q[row]), int(cu_q[row + 1])), slice(int(cu_k[row]), int(cu_k[row + 1]))
        single = Rows.single(some_q.stop - some_q.start, some_k.stop - some_k.start, q.device)
        reach = None if window[0] == -1 else window[0]
        yield some_q, some_k, Call(single, scale, reach, causal=causal or window[1] == 0)


def played_forward(q, k, v, *rest):
    output, lse = torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0])
    for some_q, some_k, call in as_rows(q, k, *rest):
        output[some_q], row_lse = Reference().forward(q[some_q], k[some_k], v[some_k], call)
        lse[:, some_q] = row_lse.T.float()
    return output, lse


def played_backward(g, q, k, v, o, lse, *rest):
    assert lse.shape == (q.shape[1], q.shape[0]) and lse.dtype == torch.float32 and lse.is_contiguous()
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for some_q, some_k, call in as_rows(q, k, *rest):
        gradients = Reference().backward(g[some_q], q[some_q], k[some_k], v[some_k], o[some_q], lse.T[some_q], call)
        dq[some_q], dk[some_k], dv[some_k] = gradients
    return dq, dk, dv


def aten_forward(
    q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale, window_size_left, window_size_right
):
    assert dropout == 0.0 and debug is False
    window = (window_size_left, window_size_right)
    return (*played_forward(q, k, v, cu_q, cu_k, max_q, max_k, scale, causal, window), None, None, None)


def aten_backward(
    g,
    q,
    k,
    v,
    o,
    lse,
    cu_q,
    cu_k,
    max_q,
    max_k,
    dropout,
    causal,
    rng,
    unused,
    *,
    scale,
    window_size_left,
    window_size_right,
):
    assert dropout == 0.0 and rng.dtype == torch.uint64
    window = (window_size_left, window_size_right)
    return played_backward(g, q, k, v, o, lse, cu_q, cu_k, max_q, max_k, scale, causal, window)


PLAYED = SimpleNamespace(_flash_attention_forward=aten_forward, _flash_attention_backward=aten_backward)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), rows=rows_of_calls, exclude=st.booleans())
def test_flash_attention_is_called_as_it_wants(data, rows, exclude):
    """Offsets, layouts, head sizes and windows; no GPU is needed to get these wrong."""
    tensors, call = make_call(data, rows, exclude=exclude, dtype=torch.float32, head_dim=12)
    kernel = TorchFlash()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "ATEN", PLAYED)
        _plays_alike(kernel, tensors, call)


def _plays_alike(kernel, tensors, call):
    output, lse = kernel.forward(*tensors, call)
    expected, expected_lse = by_row(Reference(), tensors, call)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-5)
    grad = torch.randn_like(output)
    gradients = kernel.backward(grad, *tensors, output, lse, call)
    leaves = [x.clone().requires_grad_() for x in tensors]
    wanted = torch.autograd.grad(by_row(Reference(), leaves, call)[0], leaves, grad)
    for mine, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


# -- choosing --------------------------------------------------------------------------------------------------------


def test_the_kernel_for_cpu_tensors_and_for_what_it_cannot_do():
    tensor = torch.zeros(1, 8)
    assert find_kernel(tensor, tensor).name == "cpu-flash"
    assert find_kernel(tensor, torch.zeros(1, 16)).name == "reference"
    assert [kernel.name for kernel in KERNELS][-1] == "reference"


def test_names_that_are_not_there_or_cannot_run():
    with pytest.raises(ValueError, match="kernel must be 'auto' or one of .*cpu-flash.*, got 'fast'"):
        kernel_named("fast")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="kernel 'torch-flash' cannot be used: no CUDA device"):
            kernel_named("torch-flash")
