"""The Triton kernels of decoding and prompts: interpreted, against the definition; compiled and counted."""

from __future__ import annotations

import importlib.util

import pytest

from tests.attention.triton_apart import run_apart

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

#: A call of each kernel: bfloat16, four query heads to a key head.
CALLS = """
import json
import torch
from focus_hf.attention.kernels.triton_gather import sparse_decode
from focus_hf.attention.kernels.triton_prompt import PromptTokens, sparse_prompt
from tests.attention.triton_absent import facts, launches

HOW = {"scale": 0.1, "local_window": 128, "sink_tokens": 4}

def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype)

def decode(batch=2, length=8192, dim=128, paged=False, new=1, kv_heads=8):
    query, reads = zeros(batch, 4 * kv_heads, new, dim), zeros(batch, kv_heads, new, 64, 6, dtype=torch.bool)
    positions = torch.full((batch, new), length - 1)
    if paged:
        key = zeros(length // 16, 16, kv_heads, dim).transpose(1, 2)
        table = zeros(batch, length // 16, dtype=torch.int32)
        sparse_decode(query, key, key, zeros(*key.shape[:3], dtype=torch.uint8), reads, positions, block_table=table,
                      **HOW)
    else:
        key = zeros(batch, kv_heads, length, dim)
        sparse_decode(query, key, key, zeros(*key.shape[:3], dtype=torch.uint8), reads, positions, **HOW)

def prompt(batch=1, length=512, dim=128, padded=False, heads_each=4, kv_heads=8):
    query, key = zeros(batch, heads_each * kv_heads, length, dim), zeros(batch, kv_heads, length, dim)
    tokens = PromptTokens.from_positions(torch.arange(length).repeat(batch, 1), length) if padded else None
    reads = zeros(batch, kv_heads, length, 64, 6, dtype=torch.bool)
    sparse_prompt(query, key, key, zeros(*key.shape[:3], dtype=torch.uint8), reads, tokens=tokens, **HOW)
"""

COMPILED = f"""{CALLS}
found = {{}}
for capability, dim, name, call in (
    (90, 128, "plain", decode), (90, 128, "paged", lambda: decode(paged=True)),
    (90, 128, "assisted", lambda: decode(new=4)),
    (90, 128, "prompt", prompt), (90, 128, "padded", lambda: prompt(padded=True)),
    (90, 64, "prompt", lambda: prompt(dim=64)), (80, 128, "plain", decode), (80, 128, "prompt", prompt),
):
    for kernel, _, made in launches(call, capability):
        found[f"{{capability}} {{dim}} {{name}} {{kernel}}"] = facts(made)
print(json.dumps(found))
"""

COUNTED = f"""{CALLS}
from studies.launches.counting import LaunchCounter

def counted(call):
    with LaunchCounter() as counter:
        kernels = [(name, list(grid)) for name, grid, _ in launches(call)]
    made = {{"zeros", "full", "zero_", "fill_", "expand"}}  # the caller's own tensors
    return [kernels, dict(counter.syncs), sorted(x for x in counter.operations.elements() if x not in made)]

steps = [counted(lambda: decode(length=8192, batch=batch)) for batch in (1, 2, 16)]
static = [counted(lambda: decode(length=8192, paged=paged)) for paged in (False, True) for _ in range(3)]
print(json.dumps([steps, static, counted(prompt), counted(lambda: prompt(padded=True, batch=3))]))
"""

#: Compiled once for caches that grow by a token a step.
GROWING = f"""{CALLS}
from triton.runtime.jit import JITFunction
compiled, compile_one = [], JITFunction._do_compile
def count(self, *args, **kwargs):
    compiled.append(self.fn.__name__)
    return compile_one(self, *args, **kwargs)
JITFunction._do_compile = count
for length in (2048, 2049, 2050, 2055, 2064):
    launches(lambda: decode(length=length, dim=64), 90)
print(json.dumps(compiled))
"""

#: Bytes that a prompt of 32k tokens allocates, 32 query heads over 8 of 128, on as many processors as an H100 has.
ALLOCATED = f"""{CALLS}
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from focus_hf.attention.kernels import triton_prompt

triton_prompt._processors = lambda device: 132

class Allocated(TorchDispatchMode):
    most = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {{}}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.most += result.numel() * result.element_size()
        return result

with FakeTensorMode():
    query, key = zeros(1, 32, 32768, 128), zeros(1, 8, 32768, 128)
    groups, reads = zeros(1, 8, 32768, dtype=torch.uint8), zeros(1, 8, 32768, 64, 6, dtype=torch.bool)
    with Allocated() as allocated:
        launches(lambda: sparse_prompt(query, key, key, groups, reads, **HOW))
print(json.dumps([allocated.most, query.numel() * query.element_size()]))
"""


#: Whether each kernel is launched with the tensors' device as the current one.
GUARDED = f"""{CALLS}
from triton.runtime.jit import JITFunction
from focus_hf.attention.kernels import triton_routing
guards, found = [], {{}}

class Guard:
    def __init__(self, tensor):
        self.tensor = tensor
    def __enter__(self):
        guards.append(self.tensor.device)
    def __exit__(self, *_):
        guards.pop()

def route():
    triton_routing.key_groups(zeros(1, 2, 9, 16), *(zeros(2, *x).float() for x in ((4, 16), (8, 4), (8,))))
    first, second, bias = zeros(2, 16, 7).float(), zeros(2, 7, 17).float(), zeros(2, 17).float()
    triton_routing.cell_reads(zeros(1, 2, 9, 16), zeros(1, 9, 2).float(), first, second, bias, zeros(2).float())

torch.cuda.device_of = Guard
JITFunction.run = lambda self, *args, **kwargs: found.update({{self.fn.__name__: len(guards)}})
for call in (decode, prompt, route):
    launches(call, 90)
print(json.dumps(found))
"""


@pytest.mark.parametrize("what", ("decode", "prompt", "alike", "routing"))
def test_it_equals_the_definition_in_the_interpreter(what):
    script = f"from tests.attention.sparse_cases import run; run({what!r})"
    assert run_apart(script, TRITON_INTERPRET="1") == "equal"


def test_compiled_as_launched():
    """Nothing is spilled in a loop; keys and values are copied 16 bytes at a time; Hopper uses its own products."""
    found = run_apart(COMPILED)
    assert len(found) == 4 * 3 + 4
    for name, got in found.items():
        capability, _, _, kernel = name.split()
        assert not got["spilled_in_loop"] and got["spilled"] <= (0 if capability == "90" else 16), (name, got)
        if kernel in ("_gather", "prompt_tile"):
            assert got["wide_copies"] >= 8 and not got["scalar_loads"], (name, got)
            assert got["narrow_copies"] <= 16, (name, got)  # of lists, which are numbers
        if kernel == "_gather":
            assert got["mma"] and got["shared"] <= 56 * 1024, (name, got)
        if kernel == "prompt_tile":
            assert (got["wgmma"], got["mma"])[capability == "80"], (name, got)
            assert all(16 * down <= 64 and 8 * across <= 64 for down, across, *_ in got["layouts"]), (
                name,
                got,
            )  # shared
            if capability == "90":
                assert all(down > 1 and across == 1 for down, across, *_ in got["layouts"]), (name, got)
                assert all(shape[1] >= 64 for _, _, *shape in got["layouts"]), (name, got)


def test_the_same_few_launches_in_any_batch_with_nothing_read_back():
    steps, static, prompt, padded = run_apart(COUNTED)
    for kernels, syncs, operations in (*steps, *static):
        assert [name for name, _ in kernels] == ["select_keys", "_gather", "merge_parts"]
        assert not syncs and len(operations) <= 5, operations
    assert static[0] == static[1] == static[2] and static[3] == static[4] == static[5]
    for kernels, syncs, operations in (prompt, padded):
        assert [name for name, _ in kernels] == ["prompt_tile"]
        assert not syncs and len(operations) <= 39, operations


def test_kernels_are_launched_on_the_device_of_their_tensors():
    found = run_apart(GUARDED)
    assert found == dict.fromkeys(("select_keys", "_gather", "merge_parts", "prompt_tile", "_groups", "_reads"), 1)


def test_a_growing_cache_compiles_once():
    assert sorted(run_apart(GROWING)) == ["_gather", "merge_parts", "select_keys"]


def test_a_prompt_takes_little_memory_beside_its_output():
    allocated, output = run_apart(ALLOCATED)
    assert output <= allocated <= 1.2 * output
