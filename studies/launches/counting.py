"""Counting what a call asks of a device: operations that it launches, and times that the host waits for an answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

#: Operations whose result, or its shape, is read by the host.
READS = (
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
)

#: Operations that launch nothing: they make room, pass on what there is, or are marks for a profiler.
FREE = (
    "_record_function_enter_new",
    "_record_function_exit",
    "_unsafe_view",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "lift_fresh",
    "new_empty",
    "new_empty_strided",
)

#: Functions that move values between host and device without an operation of their own.
COPIES: Mapping[Any, str] = {Tensor.tolist: "tolist", Tensor.numpy: "numpy", torch.tensor: "tensor"}


class LaunchCounter:
    """Counts while it is entered: ``with LaunchCounter() as counter: ...``. Real tensors and fake ones, on any device.

    Attributes:
        operations: by name; views and allocations are left out, for they launch nothing.
        syncs: what the host waits for, by the name of the operation: values read back, shapes that depend on them
            (indexing by a bool tensor among them), values sent from a Python list.
    """

    def __init__(self) -> None:
        self.operations: Counter[str] = Counter()
        self.syncs: Counter[str] = Counter()
        self._modes = ExitStack()

    def __enter__(self) -> LaunchCounter:
        self._modes.enter_context(_Functions(self))
        self._modes.enter_context(_Operations(self))
        return self

    def __exit__(self, *raised: Any) -> None:
        self._modes.__exit__(*raised)


class _Operations(TorchDispatchMode):
    def __init__(self, counter: LaunchCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READS or _depends_on_values(name, args, kwargs or {}):
            self._counter.syncs[name] += 1
        if not func.is_view and name not in FREE and name != "_local_scalar_dense":
            self._counter.operations[name] += 1
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    def __init__(self, counter: LaunchCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in COPIES and not (func is torch.tensor and args and args[0] == []):  # nothing to send
            self._counter.syncs[COPIES[func]] += 1
        return func(*args, **(kwargs or {}))


def _depends_on_values(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the shape of a result is decided by values on the device."""
    if name in ("index", "index_put", "index_put_"):
        return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1])
    return name == "repeat_interleave" and kwargs.get("output_size") is None
