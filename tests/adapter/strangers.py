"""An adapter from a stranger, and the four stock ways to load it: what each does to the base model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from peft import AutoPeftModelForCausalLM, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.families import base_model, focus_config, unbalance


def _by_load_adapter(base: str, adapter: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base)
    model.load_adapter(adapter)
    return model


LOADERS = {
    "load_adapter": _by_load_adapter,
    "AutoModelForCausalLM": lambda base, adapter: AutoModelForCausalLM.from_pretrained(adapter),
    "PeftModel": lambda base, adapter: PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter),
    "AutoPeftModelForCausalLM": lambda base, adapter: AutoPeftModelForCausalLM.from_pretrained(adapter),
}


def save_base_and_adapter(folder: Path, family: str = "llama", routing: str = "shared") -> tuple[Path, Path]:
    """Folders of a small base model and of an adapter for it."""
    base, adapters = save_base_and_adapters(folder, [routing], family)
    return base, adapters / routing


def save_base_and_adapters(folder: Path, routings: Iterable[str], family: str = "llama") -> tuple[Path, Path]:
    """Folders of a small base model and of adapters for it, each in one of the name of its routing."""
    base = folder / "base"
    base_model(family).save_pretrained(base)
    for routing in routings:
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), focus_config(routing=routing))
        unbalance(model)
        model.save_pretrained(folder / "adapters" / routing)
    return base, folder / "adapters"


def edit_weights(adapter: Path, change: Any) -> None:
    """Let ``change`` edit the tensors of an adapter's file."""
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_config(adapter: Path, **changes: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def base_hash(model: torch.nn.Module) -> str:
    """SHA-256 over the names, shapes and bytes of all that a model had before adapters came."""
    digest = hashlib.sha256()
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    for name, tensor in sorted(tensors.items()):
        if "group_router" not in name:
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Attempt:
    """One loading of an adapter's folder by one of the loaders.

    Attributes:
        model: the model with its adapter, or ``None`` if it was refused.
        error: why it was refused.
        base: the base model, however the attempt ended and whoever made it.
    """

    def __init__(self, loader: str, base: Path, adapter: Path) -> None:
        self.model, self.error = None, None
        made: list[PreTrainedModel] = []
        try:
            self.model = LOADERS[loader](str(base), str(adapter))
        except BaseException as error:
            self.error = error
            trace = error.__traceback__
            while trace is not None:  # the models that the loader's own frames still hold
                made += [v for v in trace.tb_frame.f_locals.values() if isinstance(v, PreTrainedModel)]
                trace = trace.tb_next
        if self.model is not None:
            made = [self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model]
        self.base: Any = made[0] if made else None

    @property
    def is_one_line(self) -> bool:
        return self.error is not None and isinstance(self.error, ValueError) and "\n" not in str(self.error)
