"""What Focus is measured against: methods of the field, written from their papers, at as many pairs.

Each is a small module behind one interface, `Selector`. They choose for every query head by itself, always read the
first 4 and the last 64 tokens, and are told a number of keys for each query; what their choosing costs is stated
beside, see `Cost`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ...records.results import OPPONENTS
from .attend import Counted, attend_by, opponent_attention, routable_layers
from .clusters import Clusters, k_means
from .mean_blocks import MeanBlocks
from .plain import Oracle, Random, Window
from .quest import Quest
from .selector import SINKS, WINDOW, Call, Choice, Cost, Estimate, Reader, Selector, keys_at, less_scoring, share_of
from .slash import Slash
from .streaming import Measure, Streaming

_MAKE: dict[str, Callable[[], Selector]] = {
    "window": Window,
    "random": Random,
    "quest": Quest,
    "blocks": MeanBlocks,
    "slash": Slash,
    "clusters": Clusters,
    "clusters-estimate": lambda: Clusters(estimate=True),
    "streaming": Streaming,
    "oracle": Oracle,
}


def selector_named(name: str) -> Selector:
    """An opponent by its name; streaming heads are not measured yet, see `make_selector`.

    Raises:
        ValueError: there is none.
    """
    if name not in _MAKE:
        raise ValueError(f"Opponents are {', '.join(OPPONENTS)}; got {name!r}.")
    return _MAKE[name]()


@torch.no_grad()
def make_selector(
    name: str, model: nn.Module, windows: Tensor | None, layers: Sequence[nn.Module] | None = None
) -> Selector:
    """An opponent, ready for `attend_by`.

    Args:
        name: one of `OPPONENTS`.
        model: that it is for.
        windows: token ids ``(N, T)`` to be judged; streaming heads are measured on the first one.
        layers: as for `attend_by`.

    Raises:
        ValueError: there is no such opponent, or nothing to measure streaming heads on.
    """
    selector = selector_named(name)
    if not isinstance(selector, Streaming):
        return selector
    if windows is None:
        raise ValueError("Streaming heads are measured on the text to be judged: give its token ids.")
    measure = Measure()
    with attend_by(model, measure, share=1.0, layers=layers):
        model(input_ids=windows[:1].to(next(model.parameters()).device), use_cache=False)
    return Streaming(measure.losses)


__all__ = [
    "OPPONENTS",
    "SINKS",
    "WINDOW",
    "Call",
    "Choice",
    "Clusters",
    "Cost",
    "Counted",
    "Estimate",
    "MeanBlocks",
    "Measure",
    "Oracle",
    "Quest",
    "Random",
    "Reader",
    "Selector",
    "Slash",
    "Streaming",
    "Window",
    "attend_by",
    "k_means",
    "keys_at",
    "less_scoring",
    "make_selector",
    "opponent_attention",
    "routable_layers",
    "selector_named",
    "share_of",
]
