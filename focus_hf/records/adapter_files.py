"""The files of an adapter: written whole or not at all, and checked before anyone relies on them."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..escape import one_line, shown
from ..settings import FocusSettings, check_fields

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
RESULTS_FILE = "focus_results.json"
GROUPS_FILE = "focus_groups.json"
SAMPLE_FILE = "focus_sample.json"

#: Tag by which a Focus adapter is found on a Hub.
HUB_TAG = "focus"

#: Name of the module that holds an attention layer's centroids: the last part but one of a tensor's name.
ROUTER = "group_router"

#: Everything that travels with an adapter, as patterns.
_FIGURES = ("figures/*.png", "figures/*.svg")
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE, RESULTS_FILE, GROUPS_FILE, SAMPLE_FILE, "README.md", *_FIGURES)

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


class AdapterFileError(ValueError):
    """A file of an adapter is missing, damaged, or not what its configuration says."""


@dataclass
class AdapterConfig(FocusSettings):
    """``adapter_config.json`` of a Focus adapter, read without torch.

    Args:
        base_model_name_or_path: Hub id or folder of the base model.
        revision: commit of the base model.
        target_modules, exclude_modules: which attention modules are routed, by their names.
    """

    base_model_name_or_path: str | None = None
    revision: str | None = None
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None

    def __post_init__(self) -> None:
        self.validate()

    @property
    def num_layers(self) -> int:
        """Routed layers."""
        return len(self.layers or [])

    @property
    def num_parameters(self) -> int:
        """Numbers that were trained or fitted, besides the balance potentials."""
        own = sum(math.prod(shape) for name, shape in self.tensor_shapes().items() if name != "focus_balance")
        return self.num_layers * own


def read_json(path: Path) -> Any:
    """Read a JSON file of an adapter; `AdapterFileError` if it is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # nested thousands deep
        reason = one_line(str(error))
        raise AdapterFileError(f"{path} is not valid JSON ({reason}); download or save the adapter again.") from None


def read_config(folder: str | os.PathLike[str]) -> AdapterConfig:
    """Read and check ``adapter_config.json``; `AdapterFileError` if it is missing, is not JSON, or does not describe a
    Focus adapter that can be read."""
    path = Path(folder) / CONFIG_FILE
    if not path.is_file():
        raise AdapterFileError(f"{path} does not exist: {folder} is not the folder of an adapter.")
    values = read_json(path)
    kind = values.get("peft_type") if isinstance(values, dict) else None
    if kind != "FOCUS":
        raise AdapterFileError(f"{path} has peft_type {shown(kind)}, not 'FOCUS': this is not a Focus adapter.")
    try:
        check_fields(values, str(path))
    except ValueError as error:
        raise AdapterFileError(str(error)) from None
    config = AdapterConfig(**{f.name: values[f.name] for f in fields(AdapterConfig) if f.name in values})
    heads = ("key_value_heads", "query_heads", "head_dim") if config.by_cells else ()
    for field in ("hidden_size", "layers", *heads):
        if getattr(config, field) is None:
            raise AdapterFileError(f"{path} lacks {field}; save the adapter again with this version of focus_hf.")
    return config


def check_tensors(shapes: Mapping[str, Sequence[int]], config: FocusSettings, source: str) -> None:
    """Raise `AdapterFileError` if, by the configuration, a tensor is missing, foreign, or of another shape."""
    layers: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, shape in sorted(shapes.items()):
        layer, _, kind = name.rpartition(".")
        if not kind.startswith("focus_") or not layer.endswith(f".{ROUTER}"):
            raise AdapterFileError(
                f"{source} holds {one_line(name)!r}, which is not part of a Focus adapter; do not use it."
            )
        layers[layer][kind] = tuple(shape)
    expected = config.tensor_shapes()
    for layer, found in sorted(layers.items()):
        layer = one_line(layer)
        for kind, shape in expected.items():
            if kind not in found:
                raise AdapterFileError(f"{source} lacks {layer}.{kind}; it is incomplete, download it again.")
            if found[kind] != shape:
                raise AdapterFileError(
                    f"{source}: {layer}.{kind} has shape {found[kind]}, but {CONFIG_FILE} asks for {shape}."
                )
        if foreign := sorted(found.keys() - expected.keys()):
            raise AdapterFileError(
                f"{source} holds {layer}.{one_line(foreign[0])}, which {CONFIG_FILE} does not ask for."
            )
    asked = len(config.layers or [])
    if len(layers) != asked:
        raise AdapterFileError(
            f"{source} holds centroids of {len(layers)} layers, but {CONFIG_FILE} asks for those of {asked}."
        )


def check_adapter(folder: str | os.PathLike[str]) -> AdapterConfig:
    """Decide whether a folder is a sound adapter. Whoever opens one asks here: the stock loaders, ``push``, ``pull``,
    ``info``, ``verify``, vLLM.

    Pickles of other things than weights (a trainer's) may lie there; nobody opens or pushes them.

    Returns:
        Its configuration.

    Raises:
        AdapterFileError: names the file, what is wrong with it and what to do.
    """
    folder = Path(folder)
    config = read_config(folder)
    weights = folder / WEIGHTS_FILE
    refuse_pickles((path.name for path in folder.iterdir() if path.stem == weights.stem), str(folder))
    if not weights.is_file():
        raise AdapterFileError(f"{weights} does not exist; save or download the adapter again.")
    modules = _check_weights(weights, config)
    _check_choice(config, modules, str(folder / CONFIG_FILE))
    return config


def _check_weights(path: Path, config: FocusSettings) -> list[str]:
    """Check a file of weights against its configuration, without torch, which takes seconds: names and shapes, then
    numbers. Returns the names of the attention modules that it routes."""
    from safetensors import SafetensorError, deserialize

    try:
        tensors = dict(deserialize(path.read_bytes()))
    except SafetensorError as error:
        raise AdapterFileError(
            f"{path} is damaged or cut short ({one_line(str(error))}); download it again."
        ) from None
    check_tensors({name: tensor["shape"] for name, tensor in tensors.items()}, config, str(path))
    for name, tensor in tensors.items():
        check_numbers(name, tensor["dtype"], _are_finite(tensor, LARGEST[config.by_cells]), str(path))
    return sorted({name.rpartition(f".{ROUTER}.")[0] for name in tensors})


def check_numbers(name: str, dtype: str, are_finite: bool | None, source: str) -> None:
    """Raise `AdapterFileError` if the numbers of a tensor are not finite floating-point numbers.

    Args:
        are_finite: whether all are finite as they are kept (`LARGEST`); ``None`` where they are no floating-point
            numbers.
    """
    name = one_line(name)
    if are_finite is None:
        raise AdapterFileError(
            f"{source}: {name} has type {one_line(dtype)}, expected floating point; download or save it again."
        )
    if not are_finite:
        raise AdapterFileError(
            f"{source}: {name} holds NaN or infinity, or what is too large for its type; its training diverged, train "
            "it again."
        )


def _check_choice(config: AdapterConfig, modules: Sequence[str], source: str) -> None:
    """Check that a configuration chooses the modules for which there are weights, by names: a pattern is saved as the
    names that it meant, and a stranger's is matched nowhere."""
    for field in ("target_modules", "exclude_modules"):
        wanted = getattr(config, field)
        if isinstance(wanted, str):
            raise AdapterFileError(
                f"{source}: {field} must be a list of names where there are weights, got {shown(wanted)}; save the "
                "adapter again."
            )
        for module in modules if wanted is not None else ():
            chosen = f".{module.removeprefix('base_model.model.')}".endswith(tuple(f".{name}" for name in wanted))
            if chosen != (field == "target_modules"):
                raise AdapterFileError(
                    f"{source}: {field} {'excludes' if chosen else 'leaves out'} {one_line(module)}, which "
                    f"{WEIGHTS_FILE} has; save the adapter again."
                )


#: Floating-point types as numpy reads them; bfloat16 is the upper half of a float32.
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}

#: The largest number of float16, as which the tensors of cells are kept, and of float32.
LARGEST = {True: 65504.0, False: 3.4028234663852886e38}


def _are_finite(tensor: Mapping[str, Any], largest: float) -> bool | None:
    """Whether no number of a tensor is too large, or none; ``None`` where they are no floating-point numbers."""
    import numpy as np

    if (kind := _FLOATS.get(tensor["dtype"])) is None:
        return None
    values = np.frombuffer(tensor["data"], dtype=kind)
    if tensor["dtype"] == "BF16":
        values = (values.astype("<u4") << 16).view("<f4")
    with np.errstate(invalid="ignore"):
        return bool((np.abs(values) <= largest).all())


def weights_hash(folder: str | os.PathLike[str]) -> str:
    """SHA-256 of the weights: which adapter a measured number belongs to, whatever its card says today."""
    return hashlib.sha256((Path(folder) / WEIGHTS_FILE).read_bytes()).hexdigest()


def refuse_pickles(names: Iterable[str], source: str) -> None:
    """Raise `AdapterFileError` if there is a file that could run code when it is loaded."""
    for name in names:
        if name.lower().endswith(PICKLES):
            raise AdapterFileError(
                f"{source} holds {name}, a pickle, which can run code when it is loaded. "
                f"Focus adapters are {WEIGHTS_FILE} only; remove the file."
            )


def names_a_folder(adapter: str) -> bool:
    """Whether an adapter or a model is given by its folder, there or not, and not by its Hub id."""
    return os.path.isdir(adapter) or os.path.isabs(adapter) or adapter.startswith((".", "~"))


def check_writable(adapter: str) -> None:
    """Raise `ValueError` if an adapter is on the Hub, not a folder of the user's: what lies here is a cache."""
    if not os.path.isdir(adapter):
        raise ValueError(f"--write puts files into the adapter's folder: pull {adapter} into one first.")
