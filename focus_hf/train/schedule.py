"""How a soft gate closes while centroids train."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..adapter import set_routing


class RoutingSchedule(TrainerCallback):
    """Anneals a soft gate on distant pairs, from nearly open to nearly hard. A hard gate needs no schedule.

    A soft gate that is closed passes next to no gradient to the pairs it cuts off, so training starts with an open
    one. The strength grows geometrically and depends on the step alone, so that a resumed run goes on where it was.

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
        set_routing(self.model, gate_strength=self.at(state.global_step / max(state.max_steps, 1)))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        set_routing(self.model, gate_strength=None)
