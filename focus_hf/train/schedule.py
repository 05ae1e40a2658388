"""How the routing hardens while centroids train."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..adapter import set_routing


class RoutingSchedule(TrainerCallback):
    """Anneals the gate on distant pairs, from nearly open to nearly hard, and if asked the assignments' temperature.

    A closed gate passes no gradient to the pairs it cuts off, so training starts with an open one. What is annealed
    changes geometrically and depends on the step alone, so that a resumed run continues where it was.

    Args:
        model: the model that is trained.
        gate: strength (``lambda``) at the first step, and from ``reached_at`` on.
        sharpness: spread of the scores in the softmax of the assignments, likewise (an inverse temperature, see
            `focus_hf.routing.sharpening`). ``None`` keeps the adapter's fixed temperature, as in the paper;
            training then drives the scores apart by itself (docs/results.md compares the two).
        reached_at: share of all steps after which the end is reached, in (0, 1].

    Raises:
        ValueError: a value is not positive.
    """

    def __init__(
        self,
        model: nn.Module,
        gate: tuple[float, float] = (1.0, 8.0),
        sharpness: tuple[float, float] | None = None,
        reached_at: float = 0.7,
    ) -> None:
        for name, values in (("gate", gate), ("sharpness", sharpness or ())):
            for value in values:
                if not value > 0:
                    raise ValueError(f"RoutingSchedule: {name} must be positive, got {value!r}.")
        if not 0 < reached_at <= 1:
            raise ValueError(f"RoutingSchedule: reached_at must be above 0 and at most 1, got {reached_at!r}.")
        self.model, self.gate, self.sharpness, self.reached_at = model, gate, sharpness, reached_at

    def at(self, progress: float) -> tuple[float, float | None]:
        """Gate strength and sharpness at a share of the training steps, 0 to 1."""
        done = progress / self.reached_at
        return _geometric(*self.gate, done), None if self.sharpness is None else _geometric(*self.sharpness, done)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        strength, sharpness = self.at(state.global_step / max(state.max_steps, 1))
        set_routing(self.model, gate_strength=strength, sharpness=sharpness)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        set_routing(self.model, gate_strength=None, sharpness=None)


def _geometric(start: float, end: float, progress: float) -> float:
    return start * (end / start) ** min(1.0, max(0.0, progress))
