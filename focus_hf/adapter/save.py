"""Write the adapter of a model into a folder."""

from __future__ import annotations

import copy
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from safetensors.torch import save

from .. import ranks
from ..files import write_atomically
from ..records.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from .config import FocusConfig

#: Prefix of PEFT's saved names; a plain transformers model has none of its own.
_PEFT_PREFIX = "base_model.model."


def save_adapter(
    model: Any,
    folder: str | os.PathLike[str],
    adapter_name: str | None = None,
    write: bool = True,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors`` of one Focus adapter.

    Args:
        model: a `PeftModel`, or a transformers model that got its adapter by ``load_adapter`` or ``add_adapter``.
        folder: created if it does not exist.
        adapter_name: which adapter, if the model has several Focus adapters.
        dtype: of the numbers in the file; as they are by default.
        write: ``False`` on all processes but one, where several hold parts of the model.

    Returns:
        The folder.

    Raises:
        ValueError: the model has no such adapter.
    """
    name, config = _choose_adapter(model, adapter_name)
    state = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    state = {
        f"{_PEFT_PREFIX}{key.removeprefix(_PEFT_PREFIX)}": ranks.whole(value).to(dtype or value.dtype).contiguous()
        for key, value in state.items()
    }
    if not write:
        return Path(folder)
    saved = copy.copy(config)
    saved.inference_mode = True
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if saved.base_model_name_or_path is None:
        saved.base_model_name_or_path = getattr(base, "name_or_path", None) or None
    mapping = None
    if saved.task_type is None:  # else that says by which class `AutoPeftModel` makes the base model
        mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    target = Path(folder)
    write_atomically(target / WEIGHTS_FILE, save(state, metadata={"format": "pt"}))
    with tempfile.TemporaryDirectory() as scratch:
        saved.save_pretrained(scratch, auto_mapping_dict=mapping)  # the file as PEFT writes it
        write_atomically(target / CONFIG_FILE, numbers_on_one_line((Path(scratch) / CONFIG_FILE).read_text()).encode())
    return target


def numbers_on_one_line(text: str) -> str:
    """JSON with each list of numbers, and of such lists, on one line, so that people can read what stands around."""
    for items in (r"[-+.\deE,\s]+", r"(?:\[[-+.\deE, ]+\][,\s]*)+"):
        text = re.sub(rf"\[\s+({items}?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)
    return text


def _choose_adapter(model: Any, adapter_name: str | None) -> tuple[str, FocusConfig]:
    adapters = {n: c for n, c in getattr(model, "peft_config", {}).items() if isinstance(c, FocusConfig)}
    if adapter_name is None and len(adapters) == 1:
        return next(iter(adapters.items()))
    if adapter_name in adapters:
        return str(adapter_name), adapters[str(adapter_name)]
    if not adapters:
        raise ValueError(f"This {type(model).__name__} has no Focus adapter to save.")
    raise ValueError(f"adapter_name={adapter_name!r}: choose one of {', '.join(adapters)}.")
