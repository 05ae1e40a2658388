"""The files of an adapter: written whole or not at all, and checked before anyone relies on them."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .. import ranks
from ..adapter import FocusConfig
from ..files import write_atomically

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
RESULTS_FILE = "focus_results.json"
GROUPS_FILE = "focus_groups.json"

#: Everything that travels with an adapter, as patterns.
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE, RESULTS_FILE, GROUPS_FILE, "README.md", "figures/*.png", "figures/*.svg")

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")

#: Prefix of PEFT's saved names; a plain transformers model has none of its own.
_PEFT_PREFIX = "base_model.model."


class AdapterFileError(ValueError):
    """A file of an adapter is missing, damaged, or not what its configuration says."""


def save_adapter(
    model: Any, folder: str | os.PathLike[str], adapter_name: str | None = None, write: bool = True
) -> Path:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors`` of one Focus adapter.

    Args:
        model: a `PeftModel`, or a transformers model that got its adapter by ``load_adapter`` or ``add_adapter``.
        folder: created if it does not exist.
        adapter_name: which adapter, if the model has several Focus adapters.
        write: ``False`` on all processes but one, where several hold parts of the model.

    Returns:
        The folder.

    Raises:
        ValueError: the model has no such adapter.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save

    name, config = _choose_adapter(model, adapter_name)
    state = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    state = {
        f"{_PEFT_PREFIX}{key.removeprefix(_PEFT_PREFIX)}": ranks.whole(value).contiguous()
        for key, value in state.items()
    }
    if not write:
        return Path(folder)
    saved = copy.copy(config)
    saved.inference_mode = True
    if saved.base_model_name_or_path is None:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        saved.base_model_name_or_path = getattr(base, "name_or_path", None) or None
    target = Path(folder)
    write_atomically(target / WEIGHTS_FILE, save(state, metadata={"format": "pt"}))
    write_config(target, saved)
    return target


def write_config(folder: Path, config: FocusConfig) -> None:
    """Write ``adapter_config.json`` as PEFT writes it."""
    with tempfile.TemporaryDirectory() as scratch:
        config.save_pretrained(scratch)
        write_atomically(folder / CONFIG_FILE, (Path(scratch) / CONFIG_FILE).read_bytes())


def _choose_adapter(model: Any, adapter_name: str | None) -> tuple[str, FocusConfig]:
    adapters = {n: c for n, c in getattr(model, "peft_config", {}).items() if isinstance(c, FocusConfig)}
    if adapter_name is None and len(adapters) == 1:
        return next(iter(adapters.items()))
    if adapter_name in adapters:
        return str(adapter_name), adapters[str(adapter_name)]
    if not adapters:
        raise ValueError(f"This {type(model).__name__} has no Focus adapter to save.")
    raise ValueError(f"adapter_name={adapter_name!r}: choose one of {', '.join(adapters)}.")


def read_config(folder: str | os.PathLike[str]) -> FocusConfig:
    """Read and check ``adapter_config.json``.

    Raises:
        AdapterFileError: it is missing, is not JSON, or does not describe a Focus adapter that can be read.
    """
    path = Path(folder) / CONFIG_FILE
    if not path.is_file():
        raise AdapterFileError(f"{path} does not exist: {folder} is not the folder of an adapter.")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise AdapterFileError(f"{path} is not valid JSON ({error}); download or save the adapter again.") from None
    kind = values.get("peft_type") if isinstance(values, dict) else None
    if kind != "FOCUS":
        raise AdapterFileError(f"{path} has peft_type {kind!r}, not 'FOCUS': this is not a Focus adapter.")
    try:
        config = FocusConfig.from_peft_type(**values)
    except (TypeError, ValueError) as error:
        raise AdapterFileError(f"{path}: {error}") from None
    for field in ("hidden_size", "layers"):
        if getattr(config, field) is None:
            raise AdapterFileError(f"{path} lacks {field}; save the adapter again with this version of focus_hf.")
    return config


def check_tensors(shapes: Mapping[str, Sequence[int]], config: FocusConfig, source: str) -> None:
    """Check names and shapes of an adapter's tensors against its configuration.

    Raises:
        AdapterFileError: a tensor is missing, foreign, or of another shape.
    """
    layers: dict[str, dict[str, Sequence[int]]] = defaultdict(dict)
    for name, shape in shapes.items():
        layer, _, kind = name.rpartition(".")
        layers[layer][kind] = shape
    width, groups, dim = config.hidden_size, config.num_groups, config.group_dim
    expected = {"focus_proj": (dim, int(width or 0)), "focus_centroids": (groups, dim), "focus_balance": (groups,)}
    for layer, found in sorted(layers.items()):
        for kind in sorted(found.keys() - expected.keys()):
            raise AdapterFileError(
                f"{source} holds {layer}.{kind}, which is not part of a Focus adapter; do not use it."
            )
        for kind, shape in expected.items():
            if kind not in found:
                raise AdapterFileError(f"{source} lacks {layer}.{kind}; it is incomplete, download it again.")
            if tuple(found[kind]) != shape:
                raise AdapterFileError(
                    f"{source}: {layer}.{kind} has shape {tuple(found[kind])}, but {CONFIG_FILE} asks for {shape}."
                )
    if len(layers) != len(config.layers or []):
        raise AdapterFileError(
            f"{source} holds centroids of {len(layers)} layers, but {CONFIG_FILE} lists {len(config.layers or [])}."
        )


def check_adapter(folder: str | os.PathLike[str]) -> FocusConfig:
    """Check all files of an adapter's folder.

    Returns:
        Its configuration.

    Raises:
        AdapterFileError: names the file, what is wrong with it and what to do.
    """
    folder = Path(folder)
    config = read_config(folder)
    refuse_pickles([path.name for path in folder.iterdir()], str(folder))
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise AdapterFileError(f"{path} does not exist; save or download the adapter again.")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as error:
        raise AdapterFileError(f"{path} is damaged or cut short ({error}); download it again.") from None
    check_tensors({name: tuple(tensor.shape) for name, tensor in tensors.items()}, config, str(path))
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise AdapterFileError(f"{path}: {name} holds NaN or infinity; its training diverged, train it again.")
    return config


def refuse_pickles(names: Sequence[str], source: str) -> None:
    """Raise `AdapterFileError` if there is a file that could run code when it is loaded."""
    pickles = [name for name in names if name.lower().endswith(PICKLES)]
    if pickles:
        raise AdapterFileError(
            f"{source} holds {pickles[0]}, a pickle, which can run code when it is loaded. "
            f"Focus adapters are {WEIGHTS_FILE} only; remove the file."
        )
