"""Train centroids and balance their groups."""

from .calibration import calibrate, largest_groups
from .centroids import GateSchedule, train_centroids
from .data import WindowDataset, tokenize_windows
from .progress import RichProgress

__all__ = [
    "GateSchedule",
    "RichProgress",
    "WindowDataset",
    "calibrate",
    "largest_groups",
    "tokenize_windows",
    "train_centroids",
]
