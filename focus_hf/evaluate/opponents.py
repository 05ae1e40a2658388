"""A window that costs the same as Focus."""

from __future__ import annotations

from ..adapter import FocusConfig


def equal_window(config: FocusConfig, length: int, pairs: float) -> int:
    """The narrowest window that, with the adapter's sinks, attends to at least as many pairs: found by bisection.

    Args:
        config: of the adapter.
        length: tokens of each sequence.
        pairs: share of the possible pairs.
    """

    def share(width: int) -> float:
        near = [min(i + 1, width + 1 + config.sink_tokens) if i >= config.dense_below else i + 1 for i in range(length)]
        return sum(near) / (length * (length + 1) // 2)

    low, high = 0, length - 1
    while low < high:
        middle = (low + high) // 2
        if share(middle) < pairs:
            low = middle + 1
        else:
            high = middle
    return low
