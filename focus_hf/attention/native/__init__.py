"""Routing and attention on a CPU in machine code of ours, compiled where it runs."""

from .calls import attend, cell_reads, fits_native, is_native, native_focus_attention
from .library import missing

__all__ = ["attend", "cell_reads", "fits_native", "is_native", "missing", "native_focus_attention"]
