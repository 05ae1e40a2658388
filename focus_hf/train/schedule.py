"""What changes step by step while centroids train: a soft gate closes, and the groups' balance comes to rest."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .. import routing
from ..adapter import focus_layers, set_routing


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

    def __init__(
        self,
        model: nn.Module,
        gate: tuple[float, float] = (1.0, 8.0),
        reached_at: float = 0.7,
    ) -> None:
        for value in gate:
            if not value > 0:
                raise ValueError(f"RoutingSchedule: gate must be positive, got {value!r}.")
        if not 0 < reached_at <= 1:
            raise ValueError(f"RoutingSchedule: reached_at must be above 0 and at most 1, got {reached_at!r}.")
        self.model, self.gate, self.reached_at = model, gate, reached_at

    def at(self, progress: float) -> float:
        """Gate strength at a share of the training steps, 0 to 1."""
        start, end = self.gate
        return start * (end / start) ** min(1.0, max(0.0, progress / self.reached_at))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        progress = state.global_step / max(state.max_steps, 1)
        set_routing(self.model, gate_strength=self.at(progress))
        for layer in focus_layers(self.model):
            layer.balance_rate = routing.BALANCE_RATE * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        set_routing(self.model, gate_strength=None)
        for layer in focus_layers(self.model):
            layer.balance_rate = routing.BALANCE_RATE
