"""What the page shows, as arrays: tokens, and for every head what they read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field

import numpy as np
import torch

from ..attention import Pattern
from ..interpret.weights import Stretch

#: Far tokens kept of each token and head; the page shows as many as fit.
TARGETS = 8


@dataclass
class Head:
    """One key/value head, or a layer whose heads share their groups, for all ``T`` tokens of the page.

    Weights are means over the query heads. *Far* is further back than the local window, and no sink. *Read* are the
    pairs that the adapter attends to; *dense* is the same head's attention with the same queries and keys, to all.
    Arrays are all zero until they are filled, window by window.

    Args:
        name: of the attention module.
        layer: its index.
        head: which; ``None`` for all heads of the layer.
        tokens, bands: of the page.

    Attributes:
        groups: uint8 ``(T,)``, each token's group as it is read by others.
        far: float32 ``(T,)``, share of the attention that is far.
        lost: float32 ``(T,)``, share of dense attention on tokens that are not read.
        distance: int32 ``(T, TARGETS)``, how far back the far tokens with most weight are, read or dense; 0 for none.
        weight, dense: float32 ``(T, TARGETS)``, their weights; ``weight`` is 0 where they are not read.
        received: float64 ``(T, bands)``, far attention that each token gets, by distance, summed over those who read.
        places: float64 ``(T, bands)``, how many tokens have it at that distance.
        sums: float64 ``(4,)``: pairs read, pairs possible; weight times distance, weight, both without sinks.
    """

    name: str
    layer: int
    head: int | None
    tokens: InitVar[int]
    bands: InitVar[int]

    def __post_init__(self, tokens: int, bands: int) -> None:
        self.groups = np.zeros(tokens, dtype=np.uint8)
        self.far, self.lost = np.zeros((2, tokens), dtype=np.float32)
        self.distance = np.zeros((tokens, TARGETS), dtype=np.int32)
        self.weight, self.dense = np.zeros((2, tokens, TARGETS), dtype=np.float32)
        self.received, self.places = np.zeros((2, tokens, bands))
        self.sums = np.zeros(4)

    @property
    def pairs(self) -> float:
        """Pairs attended over pairs possible."""
        return float(self.sums[0] / max(self.sums[1], 1))

    @property
    def reach(self) -> float:
        """Mean distance of its attention in tokens, sinks left out."""
        return float(self.sums[2] / max(self.sums[3], 1e-9))

    @property
    def key(self) -> str:
        """As a group report calls it."""
        return self.name if self.head is None else f"{self.name}.{self.head}"

    @property
    def title(self) -> str:
        """For people."""
        return f"layer {self.layer}" + ("" if self.head is None else f", head {self.head}")

    def take(self, stretch: Stretch, begin: int) -> None:
        """Note what a stretch of queries reads, of a window that begins at this token of the page."""
        read, dense = stretch.weights(stretch.pairs, stretch.possible)
        rows = slice(begin + stretch.start, begin + stretch.stop)
        far = stretch.bands.any(dim=0) & stretch.possible
        self.far[rows] = (read * far).sum(dim=-1).cpu()
        self.lost[rows] = (dense * ~stretch.pairs).sum(dim=-1).cpu()
        strongest = (torch.maximum(read, dense) * far).topk(min(TARGETS, stretch.stop), dim=-1)
        found = strongest.values > 0
        for of, kept in ((stretch.distance, self.distance), (read, self.weight), (dense, self.dense)):
            kept[rows, : found.shape[1]] = (of.gather(-1, strongest.indices) * found).cpu()
        for of, total in ((read, self.received), (stretch.possible.float(), self.places)):
            by_band = torch.einsum("qs,bqs->sb", of, stretch.bands.float())
            total[begin : begin + stretch.stop] += by_band.double().cpu().numpy()
        seen = read * stretch.no_sink
        sums = stretch.pairs.sum(), stretch.possible.sum(), (seen * stretch.distance).sum(), seen.sum()
        self.sums += [float(value) for value in sums]


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
    names: Mapping[str, list[str]] = field(default_factory=dict)

    @property
    def by_cells(self) -> bool:
        """Whether each head has groups of its own."""
        return any(head.head is not None for head in self.heads)

    @property
    def pairs(self) -> float:
        """Share of pairs attended, mean over heads."""
        return sum(head.pairs for head in self.heads) / len(self.heads)

    @property
    def perplexities(self) -> tuple[float | None, float | None]:
        """Of the base model and with the adapter, rounded to three digits; ``None`` where no token was predicted."""
        dense, focus = (_perplexity(losses[~np.isnan(losses)]) for losses in (self.dense_losses, self.losses))
        return dense, focus


def _perplexity(losses: np.ndarray) -> float | None:
    mean = float(losses.mean(dtype=np.float64)) if len(losses) else math.nan
    return round(math.exp(mean), 3) if math.isfinite(mean) else None
