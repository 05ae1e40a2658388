"""``GroupReport``: what each group of each layer holds, as data with a versioned schema."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..files import write_atomically

SCHEMA = 1


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
    """One layer.

    Args:
        name: of the attention module.
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
    """

    name: str
    groups: list[GroupFacts]
    contextual: float
    agreement: dict[str, Any] = field(default_factory=dict)
    flow: list[list[int]] = field(default_factory=list)
    split: list[dict[str, Any]] = field(default_factory=list)
    pairs: list[dict[str, Any]] = field(default_factory=list)
    strip: list[int] = field(default_factory=list)

    @property
    def largest(self) -> float:
        """Share of the largest group."""
        return max(group.share for group in self.groups)


@dataclass
class GroupReport:
    """What the groups of an adapter hold.

    Args:
        num_groups, top_k: of the adapter.
        text: what was read: ``name``, ``revision``, ``tokens``, ``window``, and of a treebank ``words`` and
            ``skipped``.
        layers: in order.
        strip: the text's first tokens, whose groups each layer gives.
        base_model: of the adapter.
        seed: of everything drawn.
        measured_with: versions, machine, date.
        weights_sha256: of the adapter.
        schema: version of this format.

    Raises:
        ValueError: the data does not fit the schema.
    """

    num_groups: int
    top_k: int
    text: dict[str, Any]
    layers: list[LayerFacts]
    strip: list[str] = field(default_factory=list)
    base_model: str | None = None
    seed: int = 0
    measured_with: dict[str, str] = field(default_factory=dict)
    weights_sha256: str = ""
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.schema > SCHEMA:
            raise ValueError(f"This group report has schema {self.schema}; upgrade: pip install -U focus-hf")
        for layer in self.layers:
            if len(layer.groups) != self.num_groups:
                raise ValueError(
                    f"{layer.name} has {len(layer.groups)} groups in the report, expected {self.num_groups}."
                )
            total = sum(group.share for group in layer.groups)
            if not 0.99 <= total <= 1.01:
                raise ValueError(f"Shares of the groups of {layer.name} add up to {total:.3f}, expected 1.")

    @property
    def labels(self) -> list[str]:
        """What groups of any layer are about, each once, most frequent first."""
        found = Counter(group.label for layer in self.layers for group in layer.groups)
        return [label for label, _ in found.most_common() if label not in ("mixed", "empty")]

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """The report as JSON, written to a file as well if a path is given."""
        text = json.dumps(asdict(self), ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"
        if path is not None:
            write_atomically(Path(path), text.encode())
        return text

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> GroupReport:
        """Read a report from a file.

        Raises:
            ValueError: it is not one, or of a newer schema.
            OSError: it cannot be read.
        """
        path = Path(source)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            layers = [
                LayerFacts(**{**layer, "groups": [GroupFacts(**group) for group in layer["groups"]]})
                for layer in values.pop("layers")
            ]
            unknown = values.keys() - {f.name for f in fields(cls)}
            if unknown and values.get("schema", SCHEMA) <= SCHEMA:
                raise ValueError(f"unknown entry {sorted(unknown)[0]!r}")
            return cls(layers=layers, **{k: v for k, v in values.items() if k not in unknown})
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} is not a group report that can be read: {error}") from None

    def to_markdown(self) -> str:
        """The report as Markdown for a card; everything from outside is escaped."""
        from .group_markdown import render

        return render(self)
