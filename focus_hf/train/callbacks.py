"""What Focus adds to any Trainer of transformers: what changes step by step, what is logged, and what is shown."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .. import ranks, routing
from ..adapter import PairCount, Router, focus_layers, observe_pairs, observe_routing, set_routing
from ..adapter.training import agree_on_balance

#: Steps in a row whose gradients may overflow under a float16 loss scaler before training is called diverged.
_OVERFLOWS = 20

#: What of a Trainer's log is shown.
_SHOWN = {
    "loss": "loss {:.2f}",
    "largest_group": "largest group {:.0%}",
    "pairs": "pairs {:.0%}",
    "eval_loss": "held-out loss {:.2f}",
}


class TrainingDiverged(RuntimeError):
    """The loss or a gradient became NaN or infinite; parameters are those before that step."""


class RoutingSchedule(TrainerCallback):
    """Lets the balance of the groups come to rest, and anneals a soft gate on distant pairs.

    The balance potentials follow the batches, whose texts differ; their steps shrink as a cosine to nothing, as the
    learning rate does, so that the groups of the last steps are not those of the last batch. A soft gate that is
    closed passes next to no gradient to the pairs it cuts off, so training starts with a nearly open one, and its
    strength grows geometrically; a hard gate has no strength. Both depend on the step alone, so that a resumed run
    goes on where it was.

    Args:
        model: the model that is trained.
        gate: strength (``lambda``) at the first step, and from ``reached_at`` on.
        reached_at: share of all steps after which the end is reached, in (0, 1].

    Raises:
        ValueError: a value is not positive.
    """

    def __init__(self, model: nn.Module, gate: tuple[float, float] = (1.0, 8.0), reached_at: float = 0.7) -> None:
        if not min(gate) > 0:
            raise ValueError(f"RoutingSchedule: gate must be positive, got {gate!r}.")
        if not 0 < reached_at <= 1:
            raise ValueError(f"RoutingSchedule: reached_at must be above 0 and at most 1, got {reached_at!r}.")
        self.model, self.gate, self.reached_at = model, gate, reached_at

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        progress, (start, end) = state.global_step / max(state.max_steps, 1), self.gate
        set_routing(self.model, gate_strength=start * (end / start) ** min(1.0, progress / self.reached_at))
        for layer in focus_layers(self.model):
            layer.balance_rate = routing.BALANCE_RATE * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        set_routing(self.model, gate_strength=None)
        for layer in focus_layers(self.model):
            layer.balance_rate = routing.BALANCE_RATE


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
        self._seen: dict[str, tuple[float, float]] = {}  # by layer: share of the largest group, confidence

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

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        step = state.global_step + 1
        is_logged = step % max(int(state.logging_steps or 0), 1) == 0 or (args.logging_first_step and step == 1)
        if is_logged and self._observing is None:
            self._observing = ExitStack()
            self._observing.enter_context(observe_routing(self.model, self._observe))
            self._pairs = self._observing.enter_context(observe_pairs(self.model, first_only=True))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._observing is not None:
            self._observing.close()
            self._observing = None
        if ranks.several():
            for layer in focus_layers(self.model):
                agree_on_balance(layer)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        gradients = [p.grad for p in self.model.parameters() if p.requires_grad and p.grad is not None]
        if all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
            self._overflows = 0
            return
        self._overflows += 1
        if args.fp16 and self._overflows < _OVERFLOWS:
            return  # the loss scaler skips this step and lowers its scale
        self.diverged_at = state.global_step + 1
        self.model.zero_grad()
        control.should_training_stop = True

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs.get("logs") or {}
        if "loss" not in logs or not self._seen:
            return
        largest, confidence = zip(*self._seen.values(), strict=True)
        self._seen = {}
        figures = {
            "largest_group": max(largest),
            "confidence": math.fsum(confidence) / len(confidence),
            "pairs": self._pairs.share,
        }
        for entry in (logs, *state.log_history[-1:]):
            entry.update(figures)

    def _observe(self, layer: Router, scores: Tensor, memberships: Tensor) -> None:
        config = layer.routing_config
        sharpened = scores * routing.sharpening(scores, config.training_sharpness)
        assignments, _ = routing.sinkhorn(sharpened, config.sinkhorn_iterations)
        largest = float(routing.group_shares(memberships).max())
        self._seen[layer.name] = (largest, float(assignments.amax(dim=-1).mean()))


class RichProgress(TrainerCallback):
    """Shows steps and the latest figures in a `rich` progress display.

    Args:
        progress: a started display, see `focus_hf.progress.progress_display`; without a terminal it writes a line
            for every entry of the Trainer's log.
        description: what is being trained.
    """

    def __init__(self, progress: Progress, description: str) -> None:
        self.progress, self.description = progress, description

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.task = self.progress.add_task(self.description, total=state.max_steps, completed=state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.progress.update(self.task, completed=state.global_step)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs.get("logs") or {}
        shown = [form.format(logs[name]) for name, form in _SHOWN.items() if name in logs]
        if shown:
            self.progress.update(self.task, description=f"{self.description} ({', '.join(shown)})")
