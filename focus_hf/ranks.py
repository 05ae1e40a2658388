"""Several processes training one model: means over all of them, parameters in shards."""

from __future__ import annotations

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor, distribute_tensor


def several() -> bool:
    """Whether this process is one of several that train together."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def mean(values: Tensor) -> Tensor:
    """Mean over all ranks, elementwise; every rank must ask, and gets the same."""
    if not several():
        return values
    total = values.detach().clone()
    distributed.all_reduce(total)
    return total / distributed.get_world_size()


def in_shards(parameter: Tensor) -> bool:
    """Whether FSDP has cut a parameter into shards."""
    return isinstance(parameter, DTensor)


def whole(parameter: Tensor) -> Tensor:
    """The values of a parameter that FSDP may have cut into shards; every rank must ask."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


@torch.no_grad()
def assign(parameter: Tensor, values: Tensor) -> None:
    """Set a parameter that may be in shards; ``values`` are whole and the same on every rank."""
    if isinstance(parameter, DTensor):
        values = distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(values)
