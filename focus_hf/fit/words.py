"""What a fit takes and what came out, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from .dial import DialPoint
from .estimate import Needs

#: Share of a model's layers below which routing them can save little.
_FEW = 0.5


def beforehand(expected: Needs, seconds: float) -> str:
    """What a fit is going to take, in one line."""
    return (
        f"this takes about {duration(seconds)}, {size(expected.memory)} of memory to run windows of text and "
        f"{size(expected.layer)} more to fit a layer, and {size(expected.scratch)} of scratch; Ctrl-C keeps the "
        "layers that are done, and --resume goes on"
    )


def afterwards(dial: Mapping[int, Sequence[DialPoint]], pairs: float, layers: tuple[int, int]) -> list[str]:
    """What came out, a sentence each.

    Args:
        dial: see `FitResult`.
        pairs: the share of pairs that the adapter starts with.
        layers: routed, and in the model.
    """
    said = []
    for length, points in sorted(dial.items()):
        if not points:
            continue
        point = min(points, key=lambda point: abs(point.pairs - pairs))
        said.append(
            f"At {length:,} tokens, with {point.pairs:.0%} of the pairs, it loses about {per_cent(point.loss)} of "
            f"perplexity by its own estimate; a window and the first tokens with as many pairs would lose about "
            f"{per_cent(point.window_loss)}."
        )
    routed, all_layers = layers
    if routed < _FEW * all_layers:
        said.append(
            f"Only {routed} of the model's {all_layers} layers attend to everything and can be routed: the others are "
            "as they were, and little of the whole model's time can be saved."
        )
    return said


def per_cent(loss: float) -> str:
    """A loss in nats per token as a share of perplexity."""
    if loss > math.log(10):
        return "more than 900 %"
    share = 100 * math.expm1(loss)
    return f"{share:.1f} %" if share < 10 else f"{share:.0f} %"


def duration(seconds: float) -> str:
    """Roughly."""
    if seconds < 90:
        return f"{max(1, round(seconds / 10)) * 10} seconds"
    if seconds < 5400:
        return f"{round(seconds / 60)} minutes"
    return f"{seconds / 3600:.1f} hours"


def size(count: float) -> str:
    """Of bytes."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{math.ceil(count / 1e6)} MB"
