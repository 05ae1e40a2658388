"""Speed and memory of Focus attention, as ratios against the best dense attention in the same run."""

from ..machine import environment
from .attention import bench_attention, bench_decode
from .counting import LaunchCounter
from .launches import Launches, bench_launches
from .memory import bench_memory
from .model import bench_model
from .predict import Prediction, bench_predict
from .report import save_plot, tables, to_markdown
from .serving import bench_serving
from .settings import Measurement, Setting, grid
from .training import bench_training

__all__ = [
    "LaunchCounter",
    "Launches",
    "Measurement",
    "Prediction",
    "Setting",
    "bench_attention",
    "bench_decode",
    "bench_launches",
    "bench_memory",
    "bench_model",
    "bench_predict",
    "bench_serving",
    "bench_training",
    "environment",
    "grid",
    "save_plot",
    "tables",
    "to_markdown",
]
