"""Run a model over text and note the groups of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from ..adapter import HeadView, Router, final_scores, observe_routing
from ..evaluate.modes import Mode, attending, device_of
from .windows import Window

#: Tokens from which examples are taken, and by which adapters are compared.
SAMPLE = 20_000


@dataclass
class RoutedText:
    """How one layer, or one head that routes by itself (``head`` says which), groups a text: for each window the first
    groups of its tokens, int16 ``(T,)``."""

    name: str
    head: int | None
    num_groups: int
    windows: list[np.ndarray] = field(default_factory=list)

    @property
    def groups(self) -> np.ndarray:
        """Of all tokens, window after window."""
        return np.concatenate(self.windows)


def collect(
    model: nn.Module,
    windows: Sequence[Window],
    *,
    only: Collection[str] | None = None,
    tick: Callable[[int], None] = lambda tokens: None,
) -> list[RoutedText]:
    """Read windows in hard mode, one at a time; keeps two bytes for each token and layer or head.

    Args:
        model: with an active Focus adapter.
        windows: of text.
        only: names of the layers or heads to note; all of them by default.
        tick: called with the tokens of each window that has been read.
    """
    found: dict[str, RoutedText] = {}

    def look(router: Router, scores: Tensor, memberships: Tensor) -> None:
        if only is None or router.name in only:
            head = router.head if isinstance(router, HeadView) else None
            routed = found.setdefault(router.name, RoutedText(router.name, head, scores.shape[-1]))
            routed.windows.append(final_scores(router, scores[0]).argmax(dim=-1).cpu().numpy().astype(np.int16))

    with attending(model, Mode("hard")), observe_routing(model, look), torch.no_grad():
        for window in windows:
            model(input_ids=window.ids[None].to(device_of(model)), use_cache=False)
            tick(len(window.ids))
    return list(found.values())


def first_windows(windows: Sequence[Window]) -> list[Window]:
    """As many as have `SAMPLE` tokens together."""
    ends = np.cumsum([len(window.ids) for window in windows])
    return list(windows[: int(np.searchsorted(ends, SAMPLE)) + 1])
