"""What happens to the groups while they train: logged beside the loss, to every reporter, and watched for NaN."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .. import ranks, routing
from ..adapter import PairCount, Router, focus_layers, observe_pairs, observe_routing
from ..adapter.training import agree_on_balance

#: Steps in a row whose gradients may overflow under a float16 loss scaler before training is called diverged.
_OVERFLOWS = 20


class TrainingDiverged(RuntimeError):
    """The loss or a gradient became NaN or infinite; parameters are those before that step."""


class RoutingMonitor(TrainerCallback):
    """Adds the state of the groups to a Trainer's logs.

    With each training log: ``largest_group`` (share of tokens in the largest group of any layer), ``confidence`` (mean
    probability of a token's first group), ``pairs`` (share of pairs that hard attention would attend to, first
    sequence of the batch). The ``eval_loss`` of an evaluation is that of hard attention.

    Where several processes train together, it makes them agree on the balance potentials after each step.

    It also stops a training whose gradients are not finite before they reach the parameters; `raise_if_diverged` then
    says so.

    Example:

    ```py
    >>> trainer = SFTTrainer(model, args, train_dataset=data, peft_config=FocusConfig(task_type="CAUSAL_LM"))
    >>> monitor = RoutingMonitor.attach(trainer)
    ```

    Args:
        trainer: whose logs these are.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.diverged_at: int | None = None
        self._overflows = 0
        self._observing: ExitStack | None = None
        self._pairs = PairCount()
        self._seen: dict[str, dict[str, float]] = {}

    @classmethod
    def attach(cls, trainer: Trainer) -> RoutingMonitor:
        """Make one that the trainer's reporters hear: callbacks are called in order, and they come before it."""
        monitor = cls(trainer)
        trainer.callback_handler.callbacks.insert(0, monitor)
        return monitor

    @property
    def model(self) -> nn.Module:
        return self.trainer.accelerator.unwrap_model(self.trainer.model)

    def raise_if_diverged(self) -> None:
        """Raise `TrainingDiverged` if training was stopped for it."""
        if self.diverged_at is not None:
            raise TrainingDiverged(
                f"Training diverged: the loss or a gradient was not finite at step {self.diverged_at}. Lower the "
                "learning rate, or look for damaged text."
            )

    # -- events ----------------------------------------------------------------------------------------------------

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        step = state.global_step + 1
        is_logged = step % max(int(state.logging_steps or 0), 1) == 0 or (args.logging_first_step and step == 1)
        if is_logged and self._observing is None:
            self._observing = ExitStack()
            self._observing.enter_context(observe_routing(self.model, self._observe))
            self._pairs = self._observing.enter_context(observe_pairs(self.model, first_only=True))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._observing is not None:
            self._observing.close()
            self._observing = None
        if ranks.several():
            for layer in focus_layers(self.model):
                agree_on_balance(layer)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        parameters = [p for p in self.model.parameters() if p.requires_grad and p.grad is not None]
        if all(bool(torch.isfinite(p.grad).all()) for p in parameters):  # type: ignore[arg-type]
            self._overflows = 0
            return
        self._overflows += 1
        if args.fp16 and self._overflows < _OVERFLOWS:
            return  # the loss scaler skips this step and lowers its scale
        self.diverged_at = state.global_step + 1
        for parameter in parameters:
            parameter.grad = None
        control.should_training_stop = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or "loss" not in logs or not self._seen:
            return
        figures = self._figures()
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    # -- figures ---------------------------------------------------------------------------------------------------

    def _observe(self, layer: Router, scores: Tensor, memberships: Tensor) -> None:
        config = layer.routing_config
        sharpened = scores * routing.sharpening(scores, config.training_sharpness)
        assignments, _ = routing.sinkhorn(sharpened, config.sinkhorn_iterations)
        self._seen[layer.name] = {
            "largest_group": float(routing.group_shares(memberships).max()),
            "confidence": float(assignments.amax(dim=-1).mean()),
        }

    def _figures(self) -> dict[str, float]:
        layers = list(self._seen.values())
        self._seen = {}
        return {
            "largest_group": max(layer["largest_group"] for layer in layers),
            "confidence": math.fsum(layer["confidence"] for layer in layers) / len(layers),
            "pairs": self._pairs.share,
        }
