"""An adapter's file on its way into a model: only its own tensors arrive, whichever stock loader reads it.

PEFT and transformers write every tensor of an adapter's file that bears the name of one in the model, the base
model's weights included. PEFT asks the tuner how names of the file map to names of the model; transformers asks
nobody, so a model with a Focus adapter has its ``_load_pretrained_model`` replaced by `load_own_tensors`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft.utils import WEIGHTS_NAME
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..escape import one_line
from ..records.adapter_files import (
    CONFIG_FILE,
    LARGEST,
    ROUTER,
    WEIGHTS_FILE,
    AdapterFileError,
    check_adapter,
    check_numbers,
    check_tensors,
    refuse_pickles,
)
from .config import FocusConfig
from .hooks import remove_router
from .layer import FocusLayer
from .targets import base_prefix, plain_name, unwrapped

#: Where transformers' ``load_adapter`` hands over to what writes tensors into the model.
_LOADER = "_load_pretrained_model"

#: As what the numbers of a file may be stored.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def guard(model: Any) -> None:
    """Let transformers' ``load_adapter`` write nothing into this model but an adapter's own tensors."""
    if hasattr(type(model), _LOADER):
        model.__dict__[_LOADER] = load_own_tensors


def remove_guard(model: Any) -> None:
    """Back to how transformers loads by itself."""
    model.__dict__.pop(_LOADER, None)


def load_own_tensors(**arguments: Any) -> Any:
    """What ``load_adapter`` calls in the place of ``PreTrainedModel._load_pretrained_model``, with its arguments.

    The file of a Focus adapter is checked as a whole before anything is written, and its tensors are handed on under
    the names that they have in the model. A file that is refused leaves the model as it was. Adapters of other types
    pass through.

    Raises:
        AdapterFileError: see `tensors_for`.
    """
    model, files, state = (arguments[name] for name in ("model", "checkpoint_files", "state_dict"))
    load = getattr(type(model), _LOADER)
    adapter_name, config = list(model.peft_config.items())[-1]  # `load_adapter` has just added it
    if not isinstance(config, FocusConfig):
        return load(**arguments)
    source = (files or [_source(config)])[0]
    try:
        if files and (Path(source).parent / CONFIG_FILE).is_file():
            check_adapter(Path(source).parent)
        tensors = tensors_for(model, adapter_name, read_weights(source) if state is None else state, source)
    except AdapterFileError:
        take_out(model, adapter_name)
        raise
    # The names are the model's already, and an offloaded model's device says nothing.
    own = dict(model.named_parameters())
    devices = {name: own[name].device for name in tensors}
    if any(device.type == "meta" for device in devices.values()):
        devices = arguments["load_config"].device_map
    arguments["load_config"] = replace(arguments["load_config"], weight_mapping=[], device_map=devices)
    arguments |= {"state_dict": tensors, "checkpoint_files": None, "expected_keys": list(tensors)}
    conversions = model.__dict__.get("_weight_conversions")
    try:
        return load(**arguments)
    finally:
        if conversions is not None:  # how the base model's own weights are named in its files
            model._weight_conversions = conversions


def tensors_for(
    model: nn.Module, adapter_name: str, tensors: Mapping[str, Tensor], source: str | None = None
) -> dict[str, Tensor]:
    """The tensors of an adapter's file under the names that they have in a model.

    Args:
        model: a model, or a `PeftModel` of it, into which the adapter has been injected.
        adapter_name: which adapter.
        tensors: the whole file: names as PEFT saves them, values of any device.
        source: what to call it in an error.

    Returns:
        One tensor for each of the adapter's own in the model, and no other.

    Raises:
        AdapterFileError: the file holds a tensor that is not this adapter's, lacks one, or holds one that has
            another shape or type, or is not finite.
    """
    config: FocusConfig = model.peft_config[adapter_name]  # type: ignore[index, assignment]
    source = source or _source(config)
    check_tensors({name: tuple(tensor.shape) for name, tensor in tensors.items()}, config, source)
    prefix = base_prefix(model)
    ends = tuple(f".{ROUTER}.{kind}.{adapter_name}" for kind in FocusLayer.kinds)
    names = [name for name in model.state_dict() if unwrapped(name).endswith(ends)]
    own = {plain_name(name, prefix).removesuffix(f".{adapter_name}"): name for name in names}
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        target = own.get(plain_name(name, prefix))
        name = one_line(name)
        if target is None:
            raise AdapterFileError(
                f"{source} holds {name}, for which the model has no place: it was made for another model, or is not "
                "to be trusted. Nothing of it was loaded."
            )
        if target in found:
            raise AdapterFileError(f"{source} holds {name} twice, under two names; download or save it again.")
        are_finite = bool((tensor.abs() <= LARGEST[config.by_cells]).all()) if tensor.dtype in _DTYPES else None
        check_numbers(name, str(tensor.dtype).removeprefix("torch."), are_finite, source)
        found[target] = tensor
    if missing := sorted(own.values() - found.keys()):
        raise AdapterFileError(f"{source} lacks {missing[0]}; it is incomplete, download it again.")
    return found


def read_weights(path: str) -> dict[str, Tensor]:
    """All tensors of a safetensors file.

    Raises:
        AdapterFileError: it is missing, a pickle, or not whole.
    """
    folder, name = os.path.split(path)
    pickle = os.path.join(folder, WEIGHTS_NAME)
    refuse_pickles([name] if os.path.isfile(path) or not os.path.isfile(pickle) else [WEIGHTS_NAME], folder)
    if not os.path.isfile(path):
        raise AdapterFileError(f"{path} does not exist; save or download the adapter again.")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        message = one_line(str(error))
        raise AdapterFileError(f"{path} is damaged or cut short ({message}); download it again.") from None


def awaits_weights(model: nn.Module, adapter_name: str) -> bool:
    """Whether an adapter was added to be loaded and has not been: `FocusLayer` starts such a one as NaN."""
    kinds = [layer.focus_centroids for layer in model.modules() if isinstance(layer, FocusLayer)]
    own = [kind[adapter_name] for kind in kinds if adapter_name in kind]
    return all(tensor.is_meta or not bool(torch.isfinite(tensor).any()) for tensor in own)


def take_out(model: Any, adapter_name: str) -> None:
    """Take an adapter out again whose file could not be loaded, so that the model is what it was before."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for router in [module for module in base.modules() if isinstance(module, FocusLayer)]:
        if adapter_name in router.configs:
            router.delete_adapter(adapter_name)
            if not router.configs:
                remove_router(router)
    base.peft_config.pop(adapter_name, None)
    if not base.peft_config:
        del base.peft_config
        base._hf_peft_config_loaded = False
        remove_guard(base)


def _source(config: FocusConfig) -> str:
    return f"The {WEIGHTS_FILE} of an adapter for {config.base_model_name_or_path or 'this model'}"
