"""What a training leaves beside the adapter: its log, its figures, the base model if that was trained too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..attention import HARD_GATE
from ..evaluate.leave import replace_sample
from ..files import write_atomically
from ..records import TokenSample
from ..records.adapter_files import CONFIG_FILE
from ..texts import Texts
from .checkpoints import save_base
from .recipe import TrainRecipe

#: Log of a training run, beside the adapter.
LOG_FILE = "training_log.json"


def training_facts(recipe: TrainRecipe, training: Texts, windows: int, trainer: Any, seconds: float) -> dict[str, Any]:
    """What a card says about a training that has ended, on so many windows."""
    gate = f"hard, sharpness {recipe.sharpness:g}"
    if recipe.gate != HARD_GATE:
        gate = f"{recipe.gate}, strength {recipe.gate_start:g} to {recipe.gate_end:g}"
    facts = {
        "data": training.name,
        "data revision": training.revision,
        "source": training.source,
        "windows": f"{windows:,} of {recipe.seq_len} tokens",
        "optimizer steps": trainer.state.global_step,
        "windows per step": recipe.batch_size * recipe.gradient_accumulation_steps * trainer.args.world_size,
        "learning rate": recipe.learning_rate,
        "gate": gate,
        "weights": "base model frozen" if recipe.weights == "frozen" else "base model trained too",
        "precision": "bf16" if recipe.bf16 else str(next(trainer.model.parameters()).dtype).removeprefix("torch."),
        "seed": recipe.seed,
        "processes": trainer.args.world_size,
        "seconds": round(seconds),
        "window": recipe.seq_len,
        "stride": recipe.stride or recipe.seq_len,
        "calibration windows": recipe.calibration_windows,
    }
    return facts | ({"distillation": f"{recipe.distill:g} of the loss"} if recipe.distill else {})


def start_records(
    model: Any, recipe: TrainRecipe, sample: TokenSample, log: list[dict[str, Any]], folder: Path
) -> None:
    """Write what is known as soon as the adapter is saved (the Trainer's log, the base model if it was trained, tokens
    with their groups), and remove what was said of the one before it."""
    finite = json.loads(json.dumps(log), parse_constant=lambda name: None)  # JSON has no NaN
    write_atomically(folder / LOG_FILE, (json.dumps(finite, indent=1) + "\n").encode())
    if recipe.weights == "trained":
        save_base(model, folder / "base", recipe.tokenizer or recipe.model)
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        config["base_model_name_or_path"] = str((folder / "base").resolve())  # it belongs to these weights now
        write_atomically(folder / CONFIG_FILE, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())
    replace_sample(sample, folder)
