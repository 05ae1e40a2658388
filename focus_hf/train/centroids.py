"""Train centroids with transformers' Trainer: the base model stays frozen, the gate hardens as training goes on."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..adapter import set_routing
from .calibration import calibrate
from .data import WindowDataset


class GateSchedule(TrainerCallback):
    """Anneals the strength of the gate on distant pairs, geometrically, from nearly open to nearly hard.

    A closed gate passes no gradient to the pairs it cuts off, so training starts with an open one.

    Args:
        model: the model that is trained.
        start: strength (``lambda``) at the first step.
        end: strength from ``reached_at`` on.
        reached_at: share of all steps after which ``end`` is reached.
    """

    def __init__(self, model: nn.Module, start: float = 1.0, end: float = 8.0, reached_at: float = 0.7) -> None:
        self.model, self.start, self.end, self.reached_at = model, start, end, reached_at

    def strength(self, progress: float) -> float:
        """Strength at a share of the training steps, 0 to 1."""
        return self.start * (self.end / self.start) ** min(1.0, progress / self.reached_at)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        set_routing(self.model, gate_strength=self.strength(state.global_step / max(state.max_steps, 1)))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        set_routing(self.model, gate_strength=None)


def train_centroids(
    model: nn.Module,
    windows: Tensor,
    output_dir: str | os.PathLike[str],
    *,
    steps: int,
    batch_size: int = 4,
    learning_rate: float = 1e-2,
    seed: int = 0,
    calibration_windows: int = 32,
    callbacks: list[TrainerCallback] | None = None,
    **training_arguments: Any,
) -> dict[str, float]:
    """Train the active Focus adapter on windows of a domain, then balance its groups.

    Args:
        model: a model with a trainable Focus adapter, such as `get_peft_model(base, FocusConfig())`.
        windows: token ids ``(N, T)``.
        output_dir: where the Trainer may write.
        steps: optimizer steps.
        batch_size: windows per step.
        learning_rate: of AdamW, with warm-up and cosine decay.
        seed: for the order of the windows.
        calibration_windows: windows used to balance the hard memberships afterwards.
        callbacks: further Trainer callbacks.
        training_arguments: further `transformers.TrainingArguments`.

    Returns:
        Share held by the largest group of every layer, see `calibrate`.
    """
    arguments: dict[str, Any] = {
        "lr_scheduler_type": "cosine",
        "warmup_steps": max(1, steps // 10),
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "dataloader_pin_memory": torch.cuda.is_available(),
        **training_arguments,
    }
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(output_dir),
            max_steps=steps,
            per_device_train_batch_size=batch_size,
            learning_rate=learning_rate,
            seed=seed,
            **arguments,
        ),
        train_dataset=WindowDataset(windows),
        callbacks=[GateSchedule(model), *(callbacks or [])],
    )
    if trainer.args.disable_tqdm:
        trainer.remove_callback(PrinterCallback)  # the caller shows progress its own way
    trainer.train()
    model.eval()
    return calibrate(model, windows[:calibration_windows].split(batch_size))
