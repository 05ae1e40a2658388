"""Which backends there are, and which one computes a call."""

from __future__ import annotations

import functools

from torch import Tensor

from .base import Kernel
from .cpu import CpuFlash
from .flash import TorchFlash
from .reference import Reference

#: All backends, best first.
KERNELS: tuple[Kernel, ...] = (TorchFlash(), CpuFlash(), Reference())


def kernel_named(name: str) -> Kernel:
    """The backend of this name.

    Raises:
        ValueError: there is none, or it cannot run on this machine.
    """
    for kernel in KERNELS:
        if kernel.name == name:
            if (why := kernel.missing()) is not None:
                raise ValueError(f"kernel {name!r} cannot be used: {why}. `focus-hf info` lists those that can.")
            return kernel
    raise ValueError(f"kernel must be 'auto' or one of {', '.join(k.name for k in KERNELS)}, got {name!r}.")


def find_kernel(query: Tensor, value: Tensor) -> Kernel:
    """The best backend for tensors like these, ``(..., D)`` and ``(..., D_v)``."""
    return next(kernel for kernel in KERNELS if kernel.unsupported(query, value) is None and _is_there(kernel))


@functools.cache
def _is_there(kernel: Kernel) -> bool:
    """Looked up once: this is asked in every layer and at every token."""
    return kernel.missing() is None
