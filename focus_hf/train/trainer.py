"""A Trainer as a recipe asks for it, whose loss may ask for the predictions of dense attention, too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from transformers import EarlyStoppingCallback, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from ..adapter import routing_mode
from .callbacks import RoutingMonitor, RoutingSchedule
from .checkpoints import SaveBaseWeights
from .recipe import TrainRecipe


class WindowDataset(Dataset):
    """Windows of token ids, int64 ``(N, T)``, as the Trainer wants them."""

    def __init__(self, windows: Tensor) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def prediction_distance(logits: Tensor, dense_logits: Tensor, labels: Tensor) -> Tensor:
    """How far predictions are from those of dense attention: ``KL(dense || these)``, summed over predicted tokens.

    Unlike the language-model loss it is zero where nothing is lost, whatever the text: its gradient is about what the
    groups leave out and little else.

    Args:
        logits: ``(B, T, V)``.
        dense_logits: ``(B, T, V)``, without gradient.
        labels: int64 ``(B, T)``; a label of -100 is not predicted, nor is the first token.

    Returns:
        float32 scalar, in nats.
    """
    total = logits.new_zeros((), dtype=torch.float32)
    for some, dense, predicted in zip(logits[:, :-1], dense_logits[:, :-1], labels[:, 1:] != -100, strict=True):
        ours, theirs = (F.log_softmax(each[predicted].float(), dim=-1) for each in (some, dense))
        total = total + F.kl_div(ours, theirs, reduction="sum", log_target=True)
    return total


class DistillingTrainer(Trainer):
    """A Trainer that mixes `prediction_distance` into the loss while it trains; evaluations are without it.

    Each step costs a forward pass with dense attention more.

    Args:
        share: of the distance in the loss, the rest being the model's own; 0 makes it a plain Trainer.
        arguments: of `transformers.Trainer`.
    """

    def __init__(self, *arguments: Any, share: float, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.share = share

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        if not self.share or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        labels, dense_logits = inputs["labels"], self._dense_logits(model, inputs)
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        distance = prediction_distance(outputs["logits"], dense_logits, labels)
        # A mean over the tokens that the Trainer takes the mean of the language-model loss over.
        if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
            processes = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
            distance = distance * processes / num_items_in_batch
        else:
            distance = distance / (labels[:, 1:] != -100).sum().clamp(min=1)
        loss = (1 - self.share) * loss + self.share * distance
        return (loss, outputs) if return_outputs else loss

    @torch.no_grad()
    def _dense_logits(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        without_labels = {name: value for name, value in inputs.items() if name != "labels"}
        model.eval()  # a teacher has no dropout
        try:
            with routing_mode(self.accelerator.unwrap_model(model), "dense"):
                return model(**without_labels)["logits"]
        finally:
            model.train()


def make_trainer(
    model: nn.Module,
    recipe: TrainRecipe,
    windows: Tensor,
    validation: Tensor,
    callbacks: Sequence[TrainerCallback] = (),
) -> tuple[Trainer, RoutingMonitor]:
    """A `transformers.Trainer` that anneals the gate, logs the groups, evaluates and saves; and its monitor.

    Args:
        model: with a trainable Focus adapter.
        recipe: how.
        windows, validation: token ids ``(N, T)`` to train on, and to evaluate on.
        callbacks: further callbacks.
    """
    arguments = training_arguments(recipe)
    both = recipe.weights == "trained"
    added = [RoutingSchedule(model, (recipe.gate_start, recipe.gate_end), recipe.annealed_at), *callbacks]
    if recipe.early_stopping:
        added.append(EarlyStoppingCallback(recipe.early_stopping))
    if both:
        added.append(SaveBaseWeights())
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
    same = ("max_steps", "gradient_accumulation_steps", "learning_rate", "seed", "bf16", "report_to")
    save_steps = recipe.eval_steps if recipe.early_stopping else recipe.save_steps
    arguments: dict[str, Any] = {
        **{name: getattr(recipe, name) for name in same},
        "output_dir": f"{recipe.output_dir}/trainer",
        "per_device_train_batch_size": recipe.batch_size,
        "per_device_eval_batch_size": recipe.batch_size,
        "lr_scheduler_type": "cosine",
        "warmup_steps": warmup_steps(recipe),
        "weight_decay": 0.0,
        "load_best_model_at_end": bool(recipe.early_stopping),
        "metric_for_best_model": "eval_loss" if recipe.early_stopping else None,
        "logging_nan_inf_filter": False,
        "remove_unused_columns": False,
        "save_total_limit": 2,
        "dataloader_pin_memory": torch.cuda.is_available(),
        # Without it, processes on a machine without accelerators would not find each other and all do the same.
        "use_cpu": not torch.accelerator.is_available(),
    }
    for what, steps in {"eval": recipe.eval_steps, "save": save_steps, "logging": recipe.logging_steps}.items():
        arguments |= {f"{what}_strategy": "steps" if steps else "no", f"{what}_steps": steps or 500}
    if recipe.gradient_checkpointing:
        arguments |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
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

    def rate(first: int, step: int) -> float:
        done, total = step - first, max(1, arguments.max_steps - first)
        warm = min(1.0, (done + 1) / warmup_steps(recipe))
        return 0.0 if done < 0 else warm * 0.5 * (1 + math.cos(math.pi * min(1.0, done / total)))

    return optimizer, LambdaLR(optimizer, [partial(rate, 0), partial(rate, recipe.centroid_steps)])
