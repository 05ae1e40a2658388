"""From fitted layers to an adapter in a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model
from torch import nn

from ..adapter import FocusConfig, focus_layers
from ..adapter.save import save_adapter
from ..routing.cells import CellRouter


@torch.no_grad()
def save_routers(
    model: nn.Module, config: FocusConfig, routers: Mapping[int, CellRouter], folder: Path
) -> tuple[PeftModel, Path]:
    """Add a fitted adapter to a model, and write it in numbers of 16 bits.

    Args:
        model: the base model.
        config: of the adapter.
        routers: by layer.
        folder: of the adapter.

    Returns:
        The model with the adapter, and the folder.
    """
    routed = get_peft_model(model, config)
    for layer in focus_layers(routed):
        tensors = routers[layer.layer_idx].tensors().values()  # in the order in which the configuration names them
        for name, tensor in zip(config.tensor_shapes(), tensors, strict=True):
            getattr(layer, name)["default"].copy_(tensor)
    return routed, save_adapter(routed, folder, dtype=torch.float16)
