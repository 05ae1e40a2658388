"""A Trainer as a recipe asks for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import EarlyStoppingCallback, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from .checkpoints import SaveBaseWeights
from .data import WindowDataset
from .distill import DistillingTrainer
from .monitor import RoutingMonitor
from .recipe import TrainRecipe
from .schedule import RoutingSchedule


def make_trainer(
    model: nn.Module,
    recipe: TrainRecipe,
    windows: Tensor,
    validation: Tensor,
    callbacks: Sequence[TrainerCallback] = (),
) -> tuple[Trainer, RoutingMonitor]:
    """A `transformers.Trainer` that anneals the gate, logs the groups, evaluates and saves.

    Args:
        model: with a trainable Focus adapter.
        recipe: how.
        windows: token ids ``(N, T)`` to train on.
        validation: token ids ``(M, T)`` to evaluate on.
        callbacks: further callbacks.

    Returns:
        The Trainer and its monitor.
    """
    arguments = training_arguments(recipe)
    both = recipe.weights == "trained"
    schedule = RoutingSchedule(model, (recipe.gate_start, recipe.gate_end), recipe.annealed_at)
    added: list[TrainerCallback] = [schedule, *callbacks]
    if recipe.early_stopping:
        added.append(EarlyStoppingCallback(recipe.early_stopping))
    if both:
        added.append(SaveBaseWeights(str(arguments.output_dir)))
    trainer = DistillingTrainer(
        model=model,
        share=recipe.distill,
        args=arguments,
        train_dataset=WindowDataset(windows),
        eval_dataset=WindowDataset(validation),
        callbacks=added,
        optimizers=_two_phase_optimizer(model, recipe, arguments) if both else (None, None),
    )
    if arguments.disable_tqdm:
        trainer.remove_callback(PrinterCallback)  # the caller shows progress its own way
    return trainer, RoutingMonitor.attach(trainer)


def training_arguments(recipe: TrainRecipe) -> TrainingArguments:
    """The Trainer's arguments, the recipe's own ``trainer`` section last.

    Raises:
        ValueError: that section names an argument that does not exist.
    """
    intervals = {"eval": recipe.eval_steps, "save": recipe.save_steps, "logging": recipe.logging_steps}
    how_often: dict[str, Any] = {}
    for what, steps in intervals.items():
        how_often |= {f"{what}_strategy": "steps" if steps else "no", f"{what}_steps": steps or 500}
    arguments: dict[str, Any] = {
        "output_dir": f"{recipe.output_dir}/trainer",
        "max_steps": recipe.max_steps,
        "per_device_train_batch_size": recipe.batch_size,
        "per_device_eval_batch_size": recipe.batch_size,
        "gradient_accumulation_steps": recipe.gradient_accumulation_steps,
        "learning_rate": recipe.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": warmup_steps(recipe),
        "weight_decay": 0.0,
        "seed": recipe.seed,
        "bf16": recipe.bf16,
        "report_to": recipe.report_to,
        "load_best_model_at_end": bool(recipe.early_stopping),
        "metric_for_best_model": "eval_loss" if recipe.early_stopping else None,
        "logging_nan_inf_filter": False,
        "remove_unused_columns": False,
        "save_total_limit": 2,
        "dataloader_pin_memory": torch.cuda.is_available(),
        # Without it, processes on a machine without accelerators would not find each other and all do the same.
        "use_cpu": not torch.accelerator.is_available(),
        **how_often,
    }
    if recipe.gradient_checkpointing:
        arguments.update(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})
    if recipe.early_stopping:
        arguments.update(save_strategy="steps", save_steps=recipe.eval_steps)
    try:
        return TrainingArguments(**{**arguments, **recipe.trainer})
    except TypeError as error:
        raise ValueError(f"trainer: {str(error).partition('() ')[2]}") from None


def warmup_steps(recipe: TrainRecipe) -> int:
    return max(1, round(recipe.warmup_share * recipe.max_steps))


def _two_phase_optimizer(
    model: nn.Module, recipe: TrainRecipe, arguments: TrainingArguments
) -> tuple[Optimizer, LambdaLR]:
    """AdamW with a rate for the centroids and one for the base, which is zero for the first ``centroid_steps``."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in named if "focus_" in name], "lr": recipe.learning_rate, "weight_decay": 0.0},
        {"params": [p for name, p in named if "focus_" not in name], "lr": recipe.base_learning_rate},
    ]
    optimizer = AdamW(groups, weight_decay=0.01, betas=(0.9, 0.95))
    start = recipe.centroid_steps

    def decay(step: int, first: int) -> float:
        if step < first:
            return 0.0
        warm, total = warmup_steps(recipe), max(1, arguments.max_steps - first)
        done = step - first
        return min(1.0, (done + 1) / warm) * 0.5 * (1 + math.cos(math.pi * min(1.0, done / total)))

    return optimizer, LambdaLR(optimizer, [lambda step: decay(step, 0), lambda step: decay(step, start)])
