"""The Focus layers of a model."""

from __future__ import annotations

import warnings

from torch import nn

from .layer import FocusLayer


def focus_layers(model: nn.Module) -> list[FocusLayer]:
    """The Focus layers of a model, in order.

    Raises:
        ValueError: the model has none.
    """
    layers = [module for module in model.modules() if isinstance(module, FocusLayer)]
    if not layers:
        raise ValueError(
            f"This {type(model).__name__} has no Focus adapter. Load one with model.load_adapter(...) or add one with "
            "get_peft_model(model, focus_hf.FocusConfig())."
        )
    return layers


def warn_if_inactive(layers: list[FocusLayer]) -> None:
    """Warn when settings are changed on a model whose adapter is switched off."""
    if all(layer.routing_adapter is None for layer in layers):
        warnings.warn("The Focus adapter is not active, so the model runs dense attention.", stacklevel=3)
