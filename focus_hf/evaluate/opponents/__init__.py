"""What Focus is measured against: methods of the field, written from their papers, at as many pairs.

Each is a `Selector`. They choose for every query head by itself and always read the first 4 and the last 64 tokens, as
their papers do; what choosing costs is stated beside, see `Cost`. Under a name that ends in ``-gqa`` the query heads
of a key head choose together, as with Focus: as many pairs are as many keys loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor, nn

from ...records.results import OPPONENTS
from .attend import Counted, attend_by, paused
from .clusters import Clusters
from .pages import MeanBlocks, Quest
from .plain import Oracle, Random, Window
from .selector import SINKS, Cost, Selector, keys_at, less_scoring
from .slash import Slash
from .streaming import Measure, Streaming

_BY_SCORES = (Quest(), Clusters(), Clusters(estimate=True), Oracle())
_TOGETHER = [selector.choosing_together() for selector in _BY_SCORES]
_ALL = (Window(), Random(), MeanBlocks(), Slash(), Streaming(), *_BY_SCORES, *_TOGETHER)
_BY_NAME: dict[str, Selector] = {selector.name: selector for selector in _ALL}


def selector_named(name: str) -> Selector:
    """An opponent by its name; streaming heads are not measured yet, see `make_selector`.

    Raises:
        ValueError: there is none.
    """
    if name not in _BY_NAME:
        raise ValueError(f"Opponents are {', '.join(OPPONENTS)}; got {name!r}.")
    return copy(_BY_NAME[name])


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
    "Cost",
    "Counted",
    "Selector",
    "attend_by",
    "keys_at",
    "less_scoring",
    "make_selector",
    "paused",
    "selector_named",
]
