"""How the routing hardens while centroids train."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..adapter import focus_layers, set_routing


class RoutingSchedule(TrainerCallback):
    """Anneals the gate on distant pairs, from nearly open to nearly hard, and the temperature of the scores.

    A closed gate passes no gradient to the pairs it cuts off, so training starts with an open one. Both change
    geometrically and depend on the step alone, so that a resumed run continues where it was.

    Args:
        model: the model that is trained.
        gate: strength (``lambda``) at the first step, and from ``reached_at`` on.
        temperature: ``tau`` at the first step; the adapter's own is reached at ``reached_at``. ``None`` keeps it.
        reached_at: share of all steps after which the end is reached, in (0, 1].

    Raises:
        ValueError: a value is not positive.
    """

    def __init__(
        self,
        model: nn.Module,
        gate: tuple[float, float] = (1.0, 8.0),
        temperature: float | None = None,
        reached_at: float = 0.7,
    ) -> None:
        for name, value in (("gate", gate[0]), ("gate", gate[1]), ("temperature", temperature or 1.0)):
            if not value > 0:
                raise ValueError(f"RoutingSchedule: {name} must be positive, got {value!r}.")
        if not 0 < reached_at <= 1:
            raise ValueError(f"RoutingSchedule: reached_at must be above 0 and at most 1, got {reached_at!r}.")
        self.model, self.gate, self.temperature, self.reached_at = model, gate, temperature, reached_at

    def strength(self, progress: float) -> float:
        """Gate strength at a share of the training steps, 0 to 1."""
        return _geometric(*self.gate, progress / self.reached_at)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        progress = state.global_step / max(state.max_steps, 1)
        set_routing(self.model, gate_strength=self.strength(progress))
        if self.temperature is not None:
            own = focus_layers(self.model)[0].routing_config.temperature
            set_routing(self.model, temperature=_geometric(self.temperature, own, progress / self.reached_at))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        set_routing(self.model, gate_strength=None, temperature=None)


def _geometric(start: float, end: float, progress: float) -> float:
    return start * (end / start) ** min(1.0, max(0.0, progress))
