"""Checkpoints of a training: finding the last whole one, and base weights where these are trained too."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import AutoTokenizer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .. import ranks
from ..files import write_atomically

#: Base weights inside a checkpoint, which for PEFT models holds the adapter only.
BASE_WEIGHTS = "base_weights.safetensors"

#: The Trainer writes it last.
_LAST_WRITTEN = "trainer_state.json"


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end, ``None`` if there is none.

    A run that was killed while it saved leaves a part of one; that part is passed over.
    """
    steps = {}
    if folder.is_dir():
        steps = {int(m[1]): p for p in folder.iterdir() if (m := re.fullmatch(r"checkpoint-(\d+)", p.name))}
    for step in sorted(steps, reverse=True):
        if _is_whole(steps[step]):
            return steps[step]
    return None


def _is_whole(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / _LAST_WRITTEN).read_text(encoding="utf-8"))
        for path in checkpoint.glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                file.keys()
    except (OSError, ValueError, SafetensorError):
        return False
    return True


class SaveBaseWeights(TrainerCallback):
    """Adds the base model's weights to each checkpoint of a model that trains them.

    Args:
        output_dir: the Trainer's.
    """

    def __init__(self, output_dir: str) -> None:
        self.output_dir = Path(output_dir)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        weights = base_state(kwargs["model"])
        if state.is_world_process_zero:
            path = self.output_dir / f"checkpoint-{state.global_step}" / BASE_WEIGHTS
            write_atomically(path, save(weights, metadata={"format": "pt"}))


def base_state(model: Any) -> dict[str, Tensor]:
    """Weights of the base model, without any adapter's; tied ones once. Every rank must ask."""
    state: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, parameter in model.get_base_model().named_parameters(remove_duplicate=False):
        if "focus_" in name or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        state[name] = ranks.whole(parameter).detach().cpu().contiguous()
    return state


@torch.no_grad()
def load_base_weights(model: Any, checkpoint: Path) -> None:
    """Put a checkpoint's base weights back.

    Raises:
        ValueError: the checkpoint has none: it was made with frozen weights.
    """
    path = checkpoint / BASE_WEIGHTS
    if not path.is_file():
        raise ValueError(
            f"{checkpoint} holds no base weights: it was trained with frozen weights, resume it like that."
        )
    weights = load_file(path)
    parameters = dict(model.get_base_model().named_parameters(remove_duplicate=False))
    for name, value in weights.items():
        ranks.assign(parameters[name], value.to(parameters[name].device))


def save_base(model: Any, folder: Path, tokenizer: str) -> None:
    """Write a trained base model, without adapters, and its tokenizer; the folder appears whole or not at all."""
    base = model.get_base_model()
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        base.save_pretrained(partial, state_dict=base_state(model))
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (partial / name).unlink(missing_ok=True)
        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(partial)
        partial.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
