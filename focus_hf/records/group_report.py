"""``GroupReport``: what each group of each layer holds, as data with a versioned schema."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..escape import one_line
from ..files import write_atomically
from .group_facts import GroupFacts, LayerFacts
from .group_markdown import render
from .typed import check_types

SCHEMA = 2


@dataclass
class GroupReport:
    """What the groups of an adapter hold.

    Args:
        num_groups, top_k: of the adapter.
        text: what was read: ``name``, ``revision``, ``tokens``, ``window``, and of a treebank ``words`` and
            ``skipped``.
        layers: in order; for an adapter with ``routing="cells"`` its heads with groups.
        strip: the text's first tokens, whose groups each layer gives.
        base_model: of the adapter.
        seed: of everything drawn.
        measured_with: versions, machine, date.
        weights_sha256: of the adapter.
        heads_left_out: heads with groups that are not in the report, see `focus_hf.interpret.run.MOST_HEADS`.
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
    heads_left_out: int = 0
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.schema > SCHEMA:
            raise ValueError(f"This group report has schema {self.schema}; upgrade focus_hf")
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
            groups = [group for layer in layers for group in layer.groups]
            for record in (*groups, *layers):
                check_types(record)
            report = cls(layers=layers, **{k: v for k, v in values.items() if k not in unknown})
            check_types(report)
            return report
        except (TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a group report that can be read: {one_line(str(error))}") from None

    def to_markdown(self) -> str:
        """The report as Markdown for a card; everything from outside is escaped."""
        return render(self.text, self.layers, self.heads_left_out)
