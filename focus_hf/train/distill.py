"""A Trainer whose loss asks for the predictions of dense attention too, or for nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Trainer

from ..adapter import routing_mode


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
        ours = F.log_softmax(some[predicted].float(), dim=-1)
        theirs = F.log_softmax(dense[predicted].float(), dim=-1)
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
        labels = inputs["labels"]
        dense_logits = self._dense_logits(model, inputs)
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
