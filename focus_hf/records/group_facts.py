"""What one layer's groups hold, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class GroupFacts:
    """One group of one layer.

    Args:
        share: of the tokens, by their first group.
        confidence: mean probability of that group.
        confidences: tokens by confidence, in ten equal bins from 0 to 1.
        positions: tokens by place in the window, in ten equal stretches.
        top: most frequent tokens: ``token`` and ``count``.
        lifted: tokens that are here more often than elsewhere: ``token``, ``count``, ``lift`` (share of the token's
            occurrences that are here, over the group's share of all tokens).
        profile: share of tokens with each property, see `focus_hf.interpret.tokens.PROFILE`.
        frequency: mean of the natural logarithm of how often the group's tokens occur in the text.
        distance: mean distance of distant attention in tokens; ``None`` where no window was long enough.
        distant: share of attention that goes to distant tokens.
        examples: ``before``, ``token``, ``after``.
        labels: for each kind of gold category, see `focus_hf.interpret.agreement.category_label`.
        upos: share of the group's words with each part of speech, those of at least one per cent.
    """

    share: float
    confidence: float
    confidences: list[int]
    positions: list[int]
    top: list[dict[str, Any]]
    lifted: list[dict[str, Any]]
    profile: dict[str, float]
    frequency: float
    distance: float | None = None
    distant: float | None = None
    examples: list[dict[str, str]] = field(default_factory=list)
    labels: dict[str, dict[str, Any]] = field(default_factory=dict)
    upos: dict[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What the group is about, in a word: a part of speech or a property of its tokens, if evident."""
        upos = self.labels.get("upos", {}).get("label", "mixed")
        if upos not in ("mixed", "empty"):
            return str(upos)
        strongest = max(self.profile, key=lambda name: self.profile[name], default="")
        if self.profile and strongest != "other" and self.profile[strongest] >= 0.9:
            return strongest
        return "mixed"


@dataclass
class LayerFacts:
    """One layer, or one key/value head that routes by itself.

    Args:
        name: of the attention module; of a head with its number behind it.
        groups: in order.
        contextual: share of tokens that are in another group than most of their kind; 0 is a lookup by token.
        agreement: for each kind of gold category, see `focus_hf.interpret.agreement.Agreement`: ``groups`` and the
            baselines ``random`` and ``lookup``.
        flow: counts ``K x K``: tokens by group here and in the next routed layer; empty for the last.
        split: tokens whose group depends on context: ``token``, ``counts`` by group, ``examples`` by group.
        pairs: distant pairs that attend because they share a group, by weight times affinity: ``weight`` (attention,
            mean over heads), ``affinity`` (``g_i . g_j``), ``distance``,
            ``group``, ``query`` and ``key`` (each ``before``, ``token``, ``after``).
        strip: groups of the report's first tokens.
        head: which key/value head; ``None`` where the layer's heads share their groups.
    """

    name: str
    groups: list[GroupFacts]
    contextual: float
    agreement: dict[str, Any] = field(default_factory=dict)
    flow: list[list[int]] = field(default_factory=list)
    split: list[dict[str, Any]] = field(default_factory=list)
    pairs: list[dict[str, Any]] = field(default_factory=list)
    strip: list[int] = field(default_factory=list)
    head: int | None = None

    @property
    def title(self) -> str:
        """For people."""
        return self.name if self.head is None else f"{self.name.removesuffix(f'.{self.head}')}, head {self.head}"

    @property
    def largest(self) -> float:
        """Share of the largest group."""
        return max(group.share for group in self.groups)
