"""Attention backends that return logsumexps, and the choice among them."""

from .base import Call, Gradients, Kernel, Result, Rows, lengthen, merge, triton_missing
from .choose import KERNELS, find_kernel, kernel_named
from .reference import Reference

__all__ = [
    "KERNELS",
    "Call",
    "Gradients",
    "Kernel",
    "Reference",
    "Result",
    "Rows",
    "find_kernel",
    "kernel_named",
    "lengthen",
    "merge",
    "triton_missing",
]
