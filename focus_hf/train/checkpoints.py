"""Checkpoints of a training: finding the last whole one, and base weights where these are trained too."""

from __future__ import annotations

import json
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
from ..records.adapter_files import CONFIG_FILE, WEIGHTS_FILE

#: Base weights inside a checkpoint, which for PEFT models holds the adapter only.
BASE_WEIGHTS = "base_weights.safetensors"

#: The Trainer writes it last.
_LAST_WRITTEN = "trainer_state.json"


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end, ``None`` if there is none.

    A run that was killed while it saved leaves a part of one; that part is passed over.
    """
    found = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]
    return next(filter(_is_whole, sorted(found, key=step_of, reverse=True)), None)


def step_of(checkpoint: Path) -> int:
    """After how many steps a checkpoint was written."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def _is_whole(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / _LAST_WRITTEN).read_text(encoding="utf-8"))
        for path in checkpoint.glob("*.safetensors"):
            with safe_open(path, framework="pt"):
                pass
    except (OSError, ValueError, SafetensorError):
        return False
    return True


class SaveBaseWeights(TrainerCallback):
    """Adds the base model's weights to each checkpoint of a model that trains them."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        weights = base_state(kwargs["model"])
        if state.is_world_process_zero:
            path = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}" / BASE_WEIGHTS
            write_atomically(path, save(weights, metadata={"format": "pt"}))


def base_state(model: Any) -> dict[str, Tensor]:
    """Weights of the base model, without any adapter's; tied ones once. Every rank must ask."""
    named = model.get_base_model().named_parameters()
    return {name: ranks.whole(p).detach().cpu().contiguous() for name, p in named if "focus_" not in name}


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
    parameters = dict(model.get_base_model().named_parameters())
    for name, value in load_file(path).items():
        ranks.assign(parameters[name], value.to(parameters[name].device))


def save_base(model: Any, folder: Path, tokenizer: str) -> None:
    """Write a trained base model, without adapters, and its tokenizer; the folder appears whole or not at all."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
        partial = Path(scratch) / folder.name
        model.get_base_model().save_pretrained(partial, state_dict=base_state(model))
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            (partial / name).unlink(missing_ok=True)
        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(partial)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
