"""A progress bar for the Trainer that shares a terminal with other output."""

from __future__ import annotations

from typing import Any

from rich.progress import Progress
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class RichProgress(TrainerCallback):
    """Shows steps and the latest loss in a `rich` progress display.

    Args:
        progress: a started display.
        description: what is being trained.
    """

    def __init__(self, progress: Progress, description: str) -> None:
        self.progress, self.description = progress, description

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.task = self.progress.add_task(self.description, total=state.max_steps)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.progress.update(self.task, completed=state.global_step)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        loss = (kwargs.get("logs") or {}).get("loss")
        if loss is not None:
            self.progress.update(self.task, description=f"{self.description} (loss {float(loss):.2f})")
