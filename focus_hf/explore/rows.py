"""The rows of the page: layers, or their heads where these route by themselves."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..adapter import FocusConfig, FocusLayer, focus_layers
from ..attention import EVERYTHING, Pattern
from .data import LayerView
from .notes import plain
from .observe import AttentionCall


@dataclass(frozen=True)
class Row:
    """A layer, or one key/value head of it that routes by itself.

    Args:
        name: of what observers are told of, see `focus_hf.adapter.observe_routing`.
        layer: its index.
        head: which; ``None`` for the layer.
    """

    name: str
    layer: int
    head: int | None = None

    def part(self, call: AttentionCall) -> AttentionCall:
        """What belongs to it of an attention call of the layer."""
        return call if self.head is None else call.of_head(self.head)

    def empty_view(self, config: FocusConfig, tokens: int, top_k: int) -> LayerView:
        """To be filled: a token of a head belongs to one group and reads as many as the head's pattern says."""
        if self.head is None:
            return LayerView.empty(tokens, top_k, config.pattern)
        how = config.head_pattern(self.layer, self.head)
        dense_below = EVERYTHING if how.attend == "everything" else config.dense_below
        pattern = Pattern(how.local_window, config.sink_tokens, dense_below)
        return LayerView.empty(tokens, 1, pattern, how.top_k if how.attend == "groups" else 0)


def rows_of(layer: FocusLayer) -> list[Row]:
    """One for a layer whose heads share their groups, else one for each head with centroids."""
    config, index = layer.routing_config, layer.layer_idx
    if config.routing == "shared":
        return [Row(layer.name, index)]
    return [Row(f"{layer.name}.{head}", index, head) for head in config.heads_with_groups(index)]


def row_names(model: nn.Module) -> list[str]:
    """Names of all rows, as they are in the base model."""
    return [plain(row.name) for layer in focus_layers(model) for row in rows_of(layer)]
