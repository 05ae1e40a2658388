"""Several processes with one model: means over all of them, parameters in shards, heads split over them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
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


def split_over(module: nn.Module) -> DeviceMesh | None:
    """The processes over which tensor parallelism has split a module's weights.

    transformers (``tp_plan``) leaves split weights as distributed tensors over a mesh with a dimension ``"tp"``.

    Returns:
        A mesh of one dimension; ``None`` where weights are whole, or split in a way that is not known.
    """
    if not several():
        return None
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            if "tp" in (mesh.mesh_dim_names or ()):
                return mesh if mesh.ndim == 1 else mesh["tp"]
    return None


class GradientsOfAllParts(torch.autograd.Function):
    """The same values, whose gradient is the sum over processes that each compute a part of what follows."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, parts: DeviceMesh) -> Tensor:
        ctx.parts = parts
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        distributed.all_reduce(total, group=ctx.parts.get_group())
        return total, None
