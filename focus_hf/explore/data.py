"""What the page shows, as arrays: tokens, and for every head what they read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from ..attention import Pattern

#: Far tokens kept of each token and head; the page shows as many as fit.
TARGETS = 8

#: Distances are packed as 16 bits.
LONGEST_WINDOW = 65_535


@dataclass
class Head:
    """One key/value head, or a layer whose heads share their groups, for all ``T`` tokens of the page.

    Weights are means over the query heads. *Far* is further back than the local window, and no sink. *Read* are the
    pairs that the adapter attends to; *dense* is the same head's attention with the same queries and keys, to all.

    Args:
        name: of the attention module.
        layer: its index.
        head: which; ``None`` for all heads of the layer.
        groups: uint8 ``(T,)``, each token's group as it is read by others.
        far: float32 ``(T,)``, share of the attention that is far.
        lost: float32 ``(T,)``, share of dense attention on tokens that are not read.
        distance: int32 ``(T, TARGETS)``, how far back the far tokens with most weight are, read or dense; 0 for none.
        weight, dense: float32 ``(T, TARGETS)``, their weights; ``weight`` is 0 where they are not read.
        received: float64 ``(T, bands)``, far attention that each token gets, by distance, summed over those who read.
        places: float64 ``(T, bands)``, how many tokens have it at that distance.
        reach: mean distance of its attention in tokens, sinks left out.
        pairs: pairs attended over pairs possible.
    """

    name: str
    layer: int
    head: int | None
    groups: np.ndarray
    far: np.ndarray
    lost: np.ndarray
    distance: np.ndarray
    weight: np.ndarray
    dense: np.ndarray
    received: np.ndarray
    places: np.ndarray
    reach: float = 0.0
    pairs: float = 0.0

    @property
    def key(self) -> str:
        """As a group report calls it."""
        return self.name if self.head is None else f"{self.name}.{self.head}"

    @property
    def title(self) -> str:
        """For people."""
        return f"layer {self.layer}" + ("" if self.head is None else f", head {self.head}")

    @classmethod
    def empty(
        cls, name: str, layer: int, head: int | None, *, tokens: int, bands: int, targets: int = TARGETS
    ) -> Head:
        """All zero, to be filled window by window."""
        far, lost = (np.zeros(tokens, dtype=np.float32) for _ in range(2))
        weight, dense = (np.zeros((tokens, targets), dtype=np.float32) for _ in range(2))
        received, places = (np.zeros((tokens, bands)) for _ in range(2))
        distance = np.zeros((tokens, targets), dtype=np.int32)
        own = np.zeros(tokens, dtype=np.uint8)
        return cls(name, layer, head, own, far, lost, distance, weight, dense, received, places)


@dataclass
class ExplorerData:
    """Everything that is on the page.

    Args:
        adapter, text: names for people.
        setting: of the dial, for people.
        tokens: what each of the ``T`` tokens adds to the text; empty for one that continues a character.
        starts: where windows start. A window is read from scratch: attention does not cross.
        pattern: window, sinks, dense start, and the bands by which distances are told.
        heads: in order.
        dense_losses, losses: float32 ``(T,)`` in nats, of predicting each token, by the base model and with the
            adapter; NaN for the first of a window.
        left_out: tokens of the text that are not on the page.
        names: of groups in the adapter's report, for heads by `Head.key`.
    """

    adapter: str
    text: str
    setting: str
    tokens: list[str]
    starts: list[int]
    pattern: Pattern
    heads: list[Head]
    dense_losses: np.ndarray
    losses: np.ndarray
    left_out: int = 0
    names: dict[str, list[str]] = field(default_factory=dict)

    @property
    def by_cells(self) -> bool:
        """Whether each head has groups of its own."""
        return any(head.head is not None for head in self.heads)

    @property
    def pairs(self) -> float:
        """Share of pairs attended, mean over heads."""
        return sum(head.pairs for head in self.heads) / len(self.heads)


def perplexity(losses: np.ndarray) -> float:
    """Of the tokens that were predicted; NaN if none was."""
    known = losses[~np.isnan(losses)]
    return math.exp(float(known.mean(dtype=np.float64))) if len(known) else math.nan
