"""Triton kernels as they are launched, for GPUs that are not here: what is compiled, what is launched.

The function that launches them is called with CPU tensors, and Triton specialises for them as it would for CUDA's:
pointers and strides that 16 divides, numbers that are 1. In a process of its own: see `triton_apart.run_apart`.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Absent:
    """As much of a driver as compiling needs."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # compiled kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


def launches(function: Callable[[], Any], capability: int | None = None) -> list[tuple[str, tuple[int, ...], Any]]:
    """Name, grid, and compiled kernel of every launch of a function, in order; nothing runs.

    Args:
        function: that launches them.
        capability: of a GPU, 90 for H100; ``None`` compiles nothing.
    """
    found, run = [], JITFunction.run

    def record(self: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
        made = run(self, *args, grid=grid, warmup=True, **kwargs) if capability else None
        found.append((self.fn.__name__, grid, made))

    JITFunction.run = record
    try:
        if capability:
            driver.set_active(Absent(capability))
        function()
    finally:
        JITFunction.run = run
    return found


def facts(made: Any) -> dict[str, Any]:
    """What a compiled kernel takes and does.

    Returns:
        Registers of a thread; bytes of shared memory; ``spilled``, instructions on local memory; ``spilled_in_loop``,
        those between the first and the last matrix product; asynchronous copies of 16 bytes and of others; loads of
        the keys' and values' dtype one by one; matrix products of each kind.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        used, code = (
            subprocess.run([tool, what, file.name], capture_output=True, text=True, check=True).stdout
            for what in ("-res-usage", "-sass")
        )
    ptx, spills = made.asm["ptx"], re.compile(r"\b(?:STL|LDL)\b")
    products = [match.start() for match in re.finditer(r"\bH(?:G)?MMA\b", code)]
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global.*?, (0x\w+)", ptx)
    layout = r"nvidia_mma<\{.*?warpsPerCTA = \[(\d+), (\d+)\], instrShape = \[([\d, ]+)\]"
    layouts = re.findall(layout, made.asm["ttgir"])
    return {
        "registers": int(re.search(r"REG:(\d+)", used)[1]),
        "shared": made.metadata.shared,
        "spilled": len(spills.findall(code)),
        "spilled_in_loop": len(spills.findall(code[products[0] : products[-1]])) if products else 0,
        "wide_copies": copies.count("0x10"),
        "narrow_copies": len(copies) - copies.count("0x10"),
        "scalar_loads": len(re.findall(r"ld\.global[\w.:]*\.b16", ptx)),
        "mma": ptx.count("mma.sync"),
        "wgmma": ptx.count("wgmma.mma_async"),
        "layouts": [[int(x) for x in (a, b, *shape.split(", "))] for a, b, shape in layouts],
    }
