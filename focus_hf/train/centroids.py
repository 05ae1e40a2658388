"""Train centroids on windows that are at hand, in one call."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from .calibration import calibrate, calibration_sample
from .data import WindowDataset
from .monitor import RoutingMonitor
from .schedule import RoutingSchedule


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

    For everything else that a training run does (reading text, measuring, saving, resuming) see `train`.

    Args:
        model: a model with a trainable Focus adapter, such as `get_peft_model(base, FocusConfig())`.
        windows: token ids ``(N, T)``.
        output_dir: where the Trainer may write.
        steps: optimizer steps.
        batch_size: windows per step.
        learning_rate: of AdamW, with warm-up and cosine decay.
        seed: for the order of the windows.
        calibration_windows: windows, spread over all of them, by which the hard memberships are balanced afterwards.
        callbacks: further Trainer callbacks.
        training_arguments: further `transformers.TrainingArguments`.

    Returns:
        Share held by the largest group of every layer, see `calibrate`.

    Raises:
        TrainingDiverged: the loss became NaN; the adapter is as it was before that step.
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
        callbacks=[RoutingSchedule(model), *(callbacks or [])],
    )
    monitor = RoutingMonitor.attach(trainer)
    if trainer.args.disable_tqdm:
        trainer.remove_callback(PrinterCallback)  # the caller shows progress its own way
    trainer.train()
    monitor.raise_if_diverged()
    model.eval()
    return calibrate(model, calibration_sample(windows, calibration_windows).split(batch_size))
