"""Which adapter an engine serves: the option's values, the adapter's configuration, its tensors by layer."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..adapter import FocusConfig
from ..adapter.control import dial_changes
from ..adapter.loading import read_weights
from ..escape import shown
from ..hub.pull import adapter_folder
from ..records.adapter_files import WEIGHTS_FILE, AdapterFileError, names_a_folder

#: How an engine is told what to serve.
EXAMPLE = '{"focus": {"adapter": "org/name"}}'


@dataclass(frozen=True)
class Serving:
    """What is under ``focus`` in ``additional_config``.

    Args:
        adapter: folder or Hub id.
        revision: branch, tag or commit of it on the Hub.
        pairs, threshold, length, top_k: the dial, in the place of the adapter's own; see `focus_hf.set_routing`.
    """

    adapter: str
    revision: str | None = None
    pairs: float | None = None
    threshold: float | None = None
    length: int | None = None
    top_k: int | None = None

    @classmethod
    def read(cls, values: Any) -> Serving:
        """The option's values, checked.

        Raises:
            ValueError: one line, for the first one that is unknown or of a wrong type.
        """
        if not isinstance(values, dict) or not isinstance(values.get("adapter"), str):
            raise ValueError(
                f"additional_config: 'focus' must be a mapping that names an adapter, such as {EXAMPLE}, got "
                f"{shown(values)}."
            )
        known = cls.__dataclass_fields__
        if foreign := sorted(str(name) for name in values.keys() - known.keys()):
            raise ValueError(f"additional_config: 'focus' has no {shown(foreign[0])}, only {', '.join(known)}.")
        revision = values.get("revision")
        if revision is not None and not isinstance(revision, str):
            raise ValueError(f"additional_config: revision of 'focus' must be a text, got {shown(revision)}.")
        return cls(**values)


@dataclass(frozen=True)
class ServedAdapter:
    """An adapter as it is served.

    Args:
        serving: what was asked for.
        config: its configuration, with the dial as it was asked for.
        folder: where its files are.
    """

    serving: Serving
    config: FocusConfig
    folder: Path

    @classmethod
    def open(cls, serving: Serving) -> ServedAdapter:
        """Find the adapter's files, from the Hub if need be, and check them.

        Raises:
            ValueError: they are not a sound Focus adapter, or it has no such dial.
            HubError: the Hub refused or was not reached.
        """
        folder = adapter_folder(serving.adapter, revision=serving.revision)
        config = FocusConfig.from_pretrained(str(folder))
        changes = dial_changes(config, serving.pairs, serving.threshold, serving.length, serving.top_k)
        for name, value in changes.items():
            setattr(config, name, value)
        served = cls(serving, config, folder)
        served.tensors()
        return served

    @property
    def pinned(self) -> dict[str, Any]:
        """What was asked for, as an option; of an adapter on the Hub, the commit that it is at now."""
        values = {name: value for name, value in asdict(self.serving).items() if value is not None}
        return values if names_a_folder(self.serving.adapter) else {**values, "revision": self.folder.name}

    def tensors(self) -> dict[int, dict[str, Tensor]]:
        """By layer, the tensors by kind (``focus_proj``, ...).

        Raises:
            AdapterFileError: a layer is there twice, or not at all.
        """
        path = self.folder / WEIGHTS_FILE
        found: dict[int, dict[str, Tensor]] = {layer: {} for layer in self.config.layers or []}
        for name, tensor in read_weights(str(path)).items():
            module, _, kind = name.rpartition(".")
            layer = found.get(_layer_index(module))
            if layer is None or kind in layer:
                raise AdapterFileError(f"{path} holds {shown(name)} twice, or for a layer that it does not route.")
            layer[kind] = tensor
        for number, layer in found.items():
            if layer.keys() != self.config.tensor_shapes().keys():
                raise AdapterFileError(f"{path} lacks tensors of layer {number}; download or save the adapter again.")
        return found


def _layer_index(name: str) -> int:
    """The index of a layer from the name of its router: the last number in it; -1 without one."""
    numbers = re.findall(r"\.(\d{1,9})(?=\.)", name)
    return int(numbers[-1]) if numbers else -1
