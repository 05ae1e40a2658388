"""The Trainer's progress, beside that of other work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.progress import Progress
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class RichProgress(TrainerCallback):
    """Shows steps and the latest figures in a `rich` progress display.

    Args:
        progress: a started display, see `focus_hf.progress.progress_display`; without a terminal it writes a line
            for every entry of the Trainer's log.
        description: what is being trained.
    """

    def __init__(self, progress: Progress, description: str) -> None:
        self.progress, self.description = progress, description

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.task = self.progress.add_task(self.description, total=state.max_steps, completed=state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.progress.update(self.task, completed=state.global_step)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs.get("logs") or {}
        shown = [f"{name} {form(logs[key])}" for key, (name, form) in _SHOWN.items() if key in logs]
        if shown:
            self.progress.update(self.task, description=f"{self.description} ({', '.join(shown)})")


#: What of a Trainer's log is shown, by which name and how.
_SHOWN: dict[str, tuple[str, Callable[[float], str]]] = {
    "loss": ("loss", "{:.2f}".format),
    "largest_group": ("largest group", "{:.0%}".format),
    "pairs": ("pairs", "{:.0%}".format),
    "eval_loss": ("held-out loss", "{:.2f}".format),
}
