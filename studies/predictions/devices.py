"""What a device can do at most: public figures of GPUs, and those of this machine, measured."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

#: Names for the device of this run, whose figures are measured.
HERE = "here"


@dataclass(frozen=True)
class Device:
    """Peak figures of a device.

    Args:
        name: of it.
        flops: floating-point operations of matrix products per second.
        bandwidth: bytes read or written per second.
        processors: that thread blocks are spread over.
        launch: seconds of the host for each operation.
        kernel: seconds that an operation takes on the device at least.
        overlaps: the host runs ahead of the device; otherwise the two take turns.
        attention: share of ``flops`` that dense attention kernels reach.
        memory: share of ``bandwidth`` that other operations reach.
        source: where the figures are from.
    """

    name: str
    flops: float
    bandwidth: float
    processors: int
    launch: float = 5e-6
    kernel: float = 2e-6
    overlaps: bool = True
    attention: float = 0.7
    memory: float = 0.8
    source: str = ""


#: Matrix products in bfloat16 or float16, dense. What attention reaches of them is stated by FlashAttention's authors:
#: 73 % on an A100 (version 2, arXiv 2307.08691), 75 % on an H100 (version 3, arXiv 2407.08608), 71 % on a B200
#: (version 4).
DEVICES = {
    device.name: device
    for device in (
        Device("A100", 312e12, 2.039e12, 108, source="NVIDIA A100 80GB SXM data sheet"),
        Device("H100", 989e12, 3.35e12, 132, source="NVIDIA H100 SXM data sheet"),
        Device("H200", 989e12, 4.8e12, 132, memory=0.9, source="NVIDIA H200 SXM data sheet; 4.3 TB/s measured"),
        Device("B200", 2250e12, 8.0e12, 148, source="NVIDIA HGX B200 data sheet (1,000 W)"),
    )
}


def check_devices(names: Sequence[str], dtype: torch.dtype) -> None:
    """Make sure that devices are known, with their figures for a dtype.

    Args:
        names: of `DEVICES`, or `HERE`.
        dtype: of matrix products.

    Raises:
        ValueError: one is not.
    """
    for name in names:
        if name != HERE and name not in DEVICES:
            raise ValueError(f"--on takes {', '.join(DEVICES)} or {HERE}, got {name!r}.")
        if name != HERE and dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"Attention on {name} is predicted for bfloat16 and float16, not {dtype}: set --dtype.")


def find_device(name: str, device: str, dtype: torch.dtype) -> Device:
    """A device by its name; `HERE` is that of this run, torch's ``device``."""
    return measure_device(device, dtype) if name == HERE else DEVICES[name]


@functools.cache
@torch.no_grad()
def measure_device(device: str, dtype: torch.dtype) -> Device:
    """Figures of a device that is here: a matrix product, a copy, and an operation on next to nothing."""
    gpu = device.startswith("cuda")
    side, copied = (8192, 2**29) if gpu else (1024, 2**26)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    source, target = (torch.ones(copied, dtype=torch.uint8, device=device) for _ in range(2))
    tiny = torch.zeros(1, device=device)
    product = _seconds(lambda: a @ b, device)
    copy = _seconds(lambda: target.copy_(source), device)
    small = _seconds(lambda: [tiny.add(1.0) for _ in range(100)], device) / 100
    return Device(
        torch.cuda.get_device_name(device) if gpu else "this CPU",
        2 * side**3 / product,
        2 * copied / copy,
        torch.cuda.get_device_properties(device).multi_processor_count if gpu else 1,
        launch=small,
        kernel=2e-6 if gpu else 0.0,
        overlaps=gpu,
        source="measured in this run: a matrix product, a copy, a small operation",
    )


def _seconds(function: Callable[[], Any], device: str) -> float:
    times = []
    for _ in range(7):
        _wait(device)
        start = time.perf_counter()
        function()
        _wait(device)
        times.append(time.perf_counter() - start)
    return median(times)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
