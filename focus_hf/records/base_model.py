"""Facts about a base model, and whether an adapter fits it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .adapter_files import AdapterConfig


@dataclass(frozen=True)
class BaseFacts:
    """A base model on the Hub.

    Args:
        name: Hub id.
        commit: of its main branch, 40 hexadecimal digits.
        license, language: as its card says.
        config: its ``config.json``; empty if it cannot be read.
    """

    name: str
    commit: str
    license: str | None = None
    language: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)


def check_fits(config: AdapterConfig, base: BaseFacts) -> None:
    """Make sure that an adapter's shapes are those of its base model.

    Raises:
        ValueError: they are not; says which value differs.
    """
    text = base.config.get("text_config") or base.config
    names = ("attention_hidden_size", "hidden_size", "n_embd", "d_model")  # the first is Zamba's: two side by side
    width = next((text[name] for name in names if name in text), None)
    if width is not None and width != config.hidden_size:
        raise ValueError(
            f"The adapter was made for a model of hidden_size {config.hidden_size}, but {base.name} has {width}: "
            "name the base model it was trained on."
        )
    layers = next((text[name] for name in ("num_hidden_layers", "n_layer", "num_layers") if name in text), None)
    if layers is not None and config.layers and max(config.layers) >= layers:
        raise ValueError(
            f"The adapter routes layer {max(config.layers)}, but {base.name} has {layers} layers: "
            "name the base model it was trained on."
        )
