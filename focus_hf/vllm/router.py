"""The groups of new tokens in one attention layer, and how its heads attend."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .. import routing
from ..adapter import FocusConfig
from ..adapter.heads import HeadRouters, classes_of_part, head_classes, head_scores, shared_columns, top_ks_by_head
from ..attention import EVERYTHING, HeadClasses, Pattern


class LayerRouter:
    """Centroids of one layer.

    Args:
        config: of the adapter.
        layer: index of the layer.
        tensors: of the layer by kind, on the layer's device.
        kv_heads: key/value heads that this process has of the layer; ``None``: all.
        part: which of how many parts of them, see `classes_of_part`.
    """

    def __init__(
        self,
        config: FocusConfig,
        layer: int,
        tensors: Mapping[str, Tensor],
        kv_heads: int | None = None,
        part: tuple[int, int] | None = None,
    ) -> None:
        self.config = config
        self.layer = layer
        self.tensors = tensors
        self.pattern, self.top_k = config.pattern, config.top_k
        self.classes: HeadClasses | None = None if config.plain else head_classes(config, layer)
        if self.classes is not None and kv_heads is not None:
            self.classes = classes_of_part(self.classes, kv_heads, part)

    def columns(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Memberships of tokens for all classes of heads, and the groups that they read where these are others.

        Args:
            hidden_states: ``(T, d)``, what enters the attention module.

        Returns:
            bool ``(T, columns)`` each.
        """
        own, config = self.tensors, self.config
        if config.routing == "shared":
            scores = routing.group_scores(hidden_states, own["focus_proj"], own["focus_centroids"], config.temperature)
            return shared_columns(config, self.layer, scores, own["focus_balance"].float()), None
        if not own:
            nothing = hidden_states.new_zeros(hidden_states.shape[0], 0, dtype=torch.bool)
            return nothing, nothing
        kinds = "focus_proj", "focus_query_proj", "focus_centroids", "focus_balance", "focus_query_bias"
        by_head = head_scores(hidden_states[None], HeadRouters.of([own[kind] for kind in kinds], config.temperature))
        reads = by_head.reads(top_ks_by_head(config, self.layer))
        return by_head.memberships()[0].flatten(-2), reads[0].flatten(-2)


class NoRouter:
    """A layer that the adapter leaves alone: it attends to everything."""

    pattern = Pattern(local_window=0, sink_tokens=0, dense_below=EVERYTHING)
    classes: HeadClasses | None = None
    top_k = 0

    def columns(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        """No groups: bool ``(T, 0)``."""
        return hidden_states.new_zeros(hidden_states.shape[0], 0, dtype=torch.bool), None
