"""Attention backends that return logsumexps, and the choice among them."""

from .base import PENALTY, Call, Gradients, Kernel, Result
from .choose import KERNELS, choose_kernel, find_kernel, kernel_named
from .cpu import CpuFlash, cpu_flash

__all__ = [
    "KERNELS",
    "PENALTY",
    "Call",
    "CpuFlash",
    "Gradients",
    "Kernel",
    "Result",
    "choose_kernel",
    "cpu_flash",
    "find_kernel",
    "kernel_named",
]
