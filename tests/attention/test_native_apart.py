"""The library's code for a 64-bit ARM processor, in an emulator: needs a compiler for it, and qemu."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from focus_hf.attention import focus_attention, native
from focus_hf.attention.native import calls
from focus_hf.attention.paths import choose_path
from focus_hf.routing import cells
from focus_hf.routing.cells import CellRouter
from tests.attention.cases import expected_of, make_call, relative_error

HERE = Path(__file__).parent
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None, reason="no emulator of ARM"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    made = tmp_path_factory.mktemp("arm") / "apart"
    sources = Path(calls.__file__).parent
    flags = ["-O3", "-std=c++17", "-static", "-fopenmp", "-ffp-contract=fast", f"-I{sources}"]
    subprocess.run([COMPILER, *flags, HERE / "native_apart.cpp", "-o", made], check=True)
    return made


def extent(shape: Sequence[int], strides: Sequence[int], width: int) -> int:
    """Numbers from the first to the last of a tensor ``(*shape, width)``."""
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + width


class Emulated:
    """`library()`, whose functions run in the emulator: what their structures point to goes there and back."""

    def __init__(self, program: Path) -> None:
        self.program = program

    def run(self, function: int, sizes: list[int], task: bytes) -> None:
        """``sizes``: bytes behind each pointer, of which the last one is written to."""
        pointers = struct.unpack_from(f"{len(sizes)}P", task)
        sizes = [size if pointer else 0 for size, pointer in zip(sizes, pointers, strict=True)]
        tensors = [ctypes.string_at(pointer, size) for pointer, size in zip(pointers, sizes, strict=True) if size]
        head = struct.pack(f"{3 + len(sizes)}q", function, len(sizes), len(task), *sizes)
        given = head + b"".join(tensors) + task
        done = subprocess.run([EMULATOR, self.program], input=given, capture_output=True, check=True)
        ctypes.memmove(pointers[-1], done.stdout, sizes[-1])

    def focus_attend(self, task: bytes) -> None:
        numbers = calls._TASK.unpack(task)
        batch, heads, kv_heads, queries, keys, dim, value_dim, of_query = numbers[27:35]
        item = 2 if numbers[40] else 4
        of_keys, of_queries = (batch, kv_heads, keys), (batch, heads, queries)
        shapes = of_queries, of_keys, of_keys, of_keys, (batch, kv_heads, queries), of_queries
        widths, items = (dim, dim, value_dim, 1, of_query, value_dim), (item, item, item, 1, 1, item)
        strides = [numbers[first : first + 3] for first in range(9, 27, 3)]
        sizes = [extent(*of) * size for *of, size in zip(shapes, strides, widths, items, strict=True)]
        self.run(0, [*sizes[:5], 4 * heads, 16 * batch, 0, sizes[5]], task)

    def focus_route(self, task: bytes) -> None:
        numbers = calls._ROUTE.unpack(task)
        batch, kv_heads, group, queries, dim, dimensions, groups, bands, _, narrow = numbers[12:]
        of_heads = (dimensions + bands + 1) * group * dim, dimensions * groups, bands * groups, 1, 1
        query = extent((batch, kv_heads * group, queries), numbers[8:11], dim) * (2 if narrow else 4)
        sizes = [4 * kv_heads * size for size in of_heads]
        self.run(1, [*sizes, query, 4 * batch * queries * bands, batch * kv_heads * queries * groups * bands], task)


@pytest.fixture
def emulated(program, monkeypatch):
    monkeypatch.setattr(calls, "library", lambda: Emulated(program))
    monkeypatch.setattr(calls, "missing", lambda: None)


@pytest.mark.parametrize("choosers", ["key heads", "query heads"])
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(("length", "chunk"), [(300, 1.0), (300, 0.3), (300, 0.0), (2500, 0.0)])
def test_attention(emulated, narrow, length, chunk, choosers):
    case: dict[str, Any] = {"seed": length, "batch": 2, "kv_heads": 2, "repeat": 3, "length": length, "head_dim": 20}
    case |= {"window": 9, "sinks": 2, "dense_below": 30, "padding": "left", "documents": False, "sink_logits": True}
    routing = {"groups": 11, "bands": 4, "share": 0.2, "choosers": choosers, "extra_mask": "none"}
    problem, mask = make_call({**case, "token_major": True, "narrow_values": True}, routing, chunk)
    if narrow:
        problem = replace(problem, **{name: getattr(problem, name).bfloat16() for name in ("query", "key", "value")})
    assert choose_path(problem) == "native"
    exact = replace(problem, **{name: getattr(problem, name).float() for name in ("query", "key", "value")})
    assert relative_error(focus_attention(problem), expected_of(exact, mask)) <= (2**-8 if narrow else 1e-5)


@pytest.mark.parametrize("queries", [1, 50])
def test_cells(emulated, queries):
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / 3

    tensors = some(2, 5, 20), some(2, 9, 5), some(2, 9), some(2, 5, 60), some(2, 4, 60), some(2, 28), some(2)
    asked, limits = some(1, queries, 6, 20).transpose(1, 2), some(1, queries, 3) - 4
    found = native.cell_reads(asked, CellRouter(*tensors), limits)
    expected = cells.cell_reads(asked.double(), CellRouter(*(x.double() for x in tensors)), limits.double())
    assert torch.equal(found, expected) and 0.1 < expected.float().mean() < 0.9
