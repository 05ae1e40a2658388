"""Attention backends that return logsumexps, and the choice among them."""

from .base import PENALTY, Call, Gradients, Kernel, Result, Rows, lengthen, merge, triton_missing
from .choose import KERNELS, find_kernel, kernel_named
from .cpu import CpuFlash, cpu_flash
from .reference import Reference

__all__ = [
    "KERNELS",
    "PENALTY",
    "Call",
    "CpuFlash",
    "Gradients",
    "Kernel",
    "Reference",
    "Result",
    "Rows",
    "cpu_flash",
    "find_kernel",
    "kernel_named",
    "lengthen",
    "merge",
    "triton_missing",
]
