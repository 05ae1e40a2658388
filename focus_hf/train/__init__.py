"""Train centroids and balance their groups."""

from typing import TYPE_CHECKING, Any

from ..texts import Texts, TextSource, tokenize_windows
from .recipe import TrainRecipe

if TYPE_CHECKING:
    from .calibration import calibrate, largest_groups
    from .callbacks import RichProgress, RoutingMonitor, RoutingSchedule, TrainingDiverged
    from .checkpoints import last_checkpoint
    from .run import TrainResult, train
    from .trainer import WindowDataset

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
    """What needs torch and PEFT is imported when it is asked for: the command line shows a recipe's flags without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import calibration, callbacks, checkpoints, run, trainer

    modules = (calibration, callbacks, checkpoints, run, trainer)
    return next(getattr(module, name) for module in modules if hasattr(module, name))
