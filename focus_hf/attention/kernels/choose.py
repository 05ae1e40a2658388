"""Which backends there are, and which one computes a call."""

from __future__ import annotations

from torch import Tensor

from .base import Kernel
from .cpu import CpuFlash

#: All backends, best first.
KERNELS: tuple[Kernel, ...] = (CpuFlash(),)


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


def find_kernel(query: Tensor, value: Tensor) -> Kernel | None:
    """The best backend for tensors like these (``(..., D)`` and ``(..., D_v)``), or ``None``."""
    for kernel in KERNELS:
        if kernel.missing() is None and kernel.unsupported(query, value) is None:
            return kernel
    return None


def choose_kernel(query: Tensor, value: Tensor) -> Kernel:
    """`find_kernel`, or an error.

    Raises:
        ValueError: no backend can run; says why for each.
    """
    kernel = find_kernel(query, value)
    if kernel is None:
        reasons = [f"{k.name}: {k.missing() or k.unsupported(query, value)}" for k in KERNELS]
        raise ValueError(
            f"No attention kernel can run on {query.dtype} tensors on {query.device} ({'; '.join(reasons)})."
        )
    return kernel
