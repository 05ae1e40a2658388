"""Train centroids and balance their groups."""

from ..texts import Texts, TextSource, tokenize_windows
from .calibration import calibrate, largest_groups
from .checkpoints import last_checkpoint
from .data import WindowDataset
from .monitor import RoutingMonitor, TrainingDiverged
from .progress import RichProgress
from .recipe import TrainRecipe
from .run import TrainResult, train
from .schedule import RoutingSchedule

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
