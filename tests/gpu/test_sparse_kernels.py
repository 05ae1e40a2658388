"""The Triton kernels of decoding and prompts on a GPU: the cases of the interpreter, and a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("what", ("decode", "prompt"))
@pytest.mark.parametrize("steps", ("small", "as launched"))
def test_it_equals_the_definition(what, steps, monkeypatch):
    from tests.attention import sparse_cases

    monkeypatch.setattr(sparse_cases, "DEVICE", "cuda")
    if steps == "small":
        for module, names in (
            (sparse_cases.triton_gather, ("STEP", "MAX_CHUNKS")),
            (sparse_cases.triton_sizes, ("SPLIT_BOUND", "KEYS")),
            (sparse_cases.triton_prompt, ("STEP", "SEGMENT")),
        ):
            for name in names:
                monkeypatch.setattr(module, name, getattr(module, name))  # put back what `small_steps` sets
        sparse_cases.small_steps()
    lengths = st.integers(2, 90 if steps == "small" else 9000)
    new = st.integers(1, 8) if what == "decode" else st.integers(1, 3000)
    one = {"decode": sparse_cases.decode, "prompt": sparse_cases.prompt}[what]
    settings(sparse_cases.SLOW, max_examples=25)(given(new=new, **sparse_cases.CASES | {"length": lengths})(one))()


def test_routing_equals_plain_torch(monkeypatch):
    from tests.attention import sparse_cases

    monkeypatch.setattr(sparse_cases, "DEVICE", "cuda")
    sparse_cases.routing()


def test_a_graph_of_one_step_serves_the_next():
    from focus_hf.attention.kernels.triton_gather import sparse_decode

    query, (key, value) = torch.randn(2, 4, 1, 64).cuda(), torch.randn(2, 2, 2, 4096, 64).cuda()
    groups = torch.randint(8, (2, 2, 4096), dtype=torch.uint8).cuda()
    reads, positions = (torch.rand(2, 2, 1, 8, 6) < 0.3).cuda(), torch.tensor([[700], [900]]).cuda()
    how = {"scale": 0.1, "local_window": 16, "sink_tokens": 4}
    sparse_decode(query, key, value, groups, reads, positions, **how)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = sparse_decode(query, key, value, groups, reads, positions, **how)
    for _ in range(3):
        positions += 1000
        graph.replay()
        expected = sparse_decode(query, key, value, groups, reads, positions, **how)
        assert torch.equal(output, expected)
