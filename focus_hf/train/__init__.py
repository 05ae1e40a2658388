"""Train centroids and balance their groups."""

from .calibration import calibrate, largest_groups
from .centroids import GateSchedule, train_centroids
from .data import tokenize_windows

__all__ = ["GateSchedule", "calibrate", "largest_groups", "tokenize_windows", "train_centroids"]
