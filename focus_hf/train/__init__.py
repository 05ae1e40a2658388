"""Train centroids and balance their groups."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..texts import Texts, TextSource, tokenize_windows
from .recipe import TrainRecipe

if TYPE_CHECKING:
    from .calibration import calibrate, largest_groups
    from .checkpoints import last_checkpoint
    from .data import WindowDataset
    from .monitor import RoutingMonitor, TrainingDiverged
    from .progress import RichProgress
    from .run import TrainResult, train
    from .schedule import RoutingSchedule

#: What needs torch and PEFT, by module: the command line shows a recipe's flags without.
_WHEN_ASKED = {
    "calibration": ("calibrate", "largest_groups"),
    "checkpoints": ("last_checkpoint",),
    "data": ("WindowDataset",),
    "monitor": ("RoutingMonitor", "TrainingDiverged"),
    "progress": ("RichProgress",),
    "run": ("TrainResult", "train"),
    "schedule": ("RoutingSchedule",),
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
