"""Train centroids and balance their groups."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..texts import Texts, TextSource, tokenize_windows
from .recipe import TrainRecipe

if TYPE_CHECKING:
    from .calibration import calibrate, largest_groups
    from .callbacks import RichProgress, RoutingMonitor, RoutingSchedule, TrainingDiverged
    from .checkpoints import last_checkpoint
    from .run import TrainResult, train
    from .trainer import WindowDataset

#: What needs torch and PEFT, by module: the command line shows a recipe's flags without.
_WHEN_ASKED = {
    "calibration": ("calibrate", "largest_groups"),
    "callbacks": ("RichProgress", "RoutingMonitor", "RoutingSchedule", "TrainingDiverged"),
    "checkpoints": ("last_checkpoint",),
    "run": ("TrainResult", "train"),
    "trainer": ("WindowDataset",),
}

__all__ = [
    "RichProgress",
    "RoutingMonitor",
    "RoutingSchedule",
    "TextSource",
    "Texts",
    "TrainRecipe",
    "TrainResult",
    "TrainingDiverged",
    "WindowDataset",
    "calibrate",
    "largest_groups",
    "last_checkpoint",
    "tokenize_windows",
    "train",
]


def __getattr__(name: str) -> Any:
    for module, names in _WHEN_ASKED.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
