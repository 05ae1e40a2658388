"""What the page shows, as arrays: tokens, and for every side and layer the groups and the attention that matters."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from ..attention import Pattern

#: Distant tokens kept of each token and layer, of those attended and of those lost. The page shows as many as fit.
TARGETS = 4

#: Distances are packed as 16 bits.
LONGEST_WINDOW = 65_535


@dataclass
class LayerView:
    """One layer of one side, or one head of it that routes by itself, for all ``T`` tokens of the page.

    Attention weights are means over the heads that share the groups. *Far* is further back than the local window.

    Args:
        groups: uint8 ``(T, k)``, the token's groups, the most probable one first.
        confidence: float32 ``(T,)``, probability of that one.
        near, sink: float32 ``(T,)``, attention to the local window, and to sinks beyond it. The rest goes to far
            tokens of a shared group (or below ``dense_below``).
        far_distance: int32 ``(T, TARGETS)``, how far back the most attended far tokens are; 0 for none.
        far_weight: float32 ``(T, TARGETS)``, their weights, falling.
        lost: float32 ``(T,)``, attention that the base model pays to tokens which are not attended here.
        lost_distance, lost_weight: the same for those tokens, with the base model's weights.
        pattern: window, sinks, dense start.
        reads: uint8 ``(T, r)``, the groups whose keys the token attends to; ``None`` where they are its own.
        pairs: pairs attended over pairs possible.
    """

    groups: np.ndarray
    confidence: np.ndarray
    near: np.ndarray
    sink: np.ndarray
    far_distance: np.ndarray
    far_weight: np.ndarray
    lost: np.ndarray
    lost_distance: np.ndarray
    lost_weight: np.ndarray
    pattern: Pattern
    reads: np.ndarray | None = None
    pairs: float = 0.0

    @classmethod
    def empty(
        cls, tokens: int, top_k: int, pattern: Pattern, reads: int | None = None, targets: int = TARGETS
    ) -> LayerView:
        """All zero, to be filled window by window.

        Args:
            tokens, top_k, targets: ``T``, ``k``, ``TARGETS``.
            pattern: see `LayerView`.
            reads: ``r``.
        """
        single = [np.zeros(tokens, dtype=np.float32) for _ in range(4)]
        distances = [np.zeros((tokens, targets), dtype=np.int32) for _ in range(2)]
        weights = [np.zeros((tokens, targets), dtype=np.float32) for _ in range(2)]
        return cls(
            groups=np.zeros((tokens, top_k), dtype=np.uint8),
            confidence=single[0],
            near=single[1],
            sink=single[2],
            far_distance=distances[0],
            far_weight=weights[0],
            lost=single[3],
            lost_distance=distances[1],
            lost_weight=weights[1],
            pattern=pattern,
            reads=None if reads is None else np.zeros((tokens, reads), dtype=np.uint8),
        )


@dataclass(frozen=True)
class GroupNote:
    """What the adapter's own report says about a group: its label, its share of tokens, its typical tokens."""

    label: str
    share: float
    tokens: list[str]


@dataclass
class Side:
    """One adapter at one ``top_k``.

    Args:
        name: for people.
        top_k, num_groups: groups per token and per layer.
        pattern: window, sinks, dense start of the adapter; heads may have their own, see `LayerView`.
        layers: in the order of `ExplorerData.layers`.
        losses: float32 ``(T,)`` in nats, of predicting each token; NaN for the first of a window.
        notes: for each layer the groups' notes, empty for a head that the report leaves out; empty without a report.
        colours: for each layer and group its colour: the number of the group of the first side that it matches.
        overlaps: for each layer and group how well it matches that group (Jaccard, -1: no counterpart); empty where
            both sides have the same groups.
    """

    name: str
    top_k: int
    num_groups: int
    pattern: Pattern
    layers: list[LayerView]
    losses: np.ndarray
    notes: list[list[GroupNote]] = field(default_factory=list)
    colours: list[list[int]] = field(default_factory=list)
    overlaps: list[list[float]] = field(default_factory=list)

    @property
    def pairs(self) -> float:
        """Share of pairs attended, mean over layers."""
        return sum(layer.pairs for layer in self.layers) / len(self.layers)


@dataclass
class ExplorerData:
    """Everything that is on the page.

    Args:
        text: name of the text.
        tokens: what each of the ``T`` tokens adds to the text; empty for one that continues a character.
        starts: where windows start. A window is read from scratch: attention does not cross.
        layers: names of the routed attention modules; of heads that route by themselves with the head behind it.
        sides: one or two.
        dense_losses: float32 ``(T,)``, the base model's, see `Side.losses`.
        left_out: tokens of the text that are not on the page.
    """

    text: str
    tokens: list[str]
    starts: list[int]
    layers: list[str]
    sides: list[Side]
    dense_losses: np.ndarray
    left_out: int = 0


def perplexity(losses: np.ndarray) -> float:
    """Of the tokens that were predicted; NaN if none was."""
    known = losses[~np.isnan(losses)]
    return math.exp(float(known.mean(dtype=np.float64))) if len(known) else math.nan
