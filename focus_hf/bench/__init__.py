"""Speed and memory of Focus attention, as ratios against the best dense attention in the same run."""

from .attention import bench_attention, bench_decode
from .memory import bench_memory
from .model import bench_model
from .report import to_markdown
from .serving import bench_serving
from .settings import Measurement, Setting, grid

__all__ = [
    "Measurement",
    "Setting",
    "bench_attention",
    "bench_decode",
    "bench_memory",
    "bench_model",
    "bench_serving",
    "grid",
    "to_markdown",
]
