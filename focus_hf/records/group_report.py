"""``GroupReport``: what each group of each layer holds and who reads it, as data with a versioned schema."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..escape import one_line
from ..files import write_atomically
from .adapter_files import GROUPS_FILE
from .group_facts import NAMELESS, GroupFacts, LayerFacts
from .group_markdown import render
from .typed import check_types

SCHEMA = 3


@dataclass
class GroupReport:
    """What the groups of an adapter hold.

    Args:
        num_groups, top_k: of the adapter.
        text: what was read: ``name``, ``revision``, ``tokens``, ``window``, and of a treebank ``words`` and
            ``skipped``; ``besides`` it (``name``, ``revision``) plain text.
        layers: in order; for an adapter with ``routing="cells"`` heads.
        bands: a band of distance begins beyond so many tokens and ends where the next one begins.
        setting: of the adapter while it was looked at, such as ``"pairs=0.25"``.
        strip: the text's first tokens, whose groups each layer gives.
        base_model: of the adapter.
        attention_layers: of the base model, routed or not.
        routed_layers: those that are routed.
        seed: of everything drawn.
        measured_with: versions, machine, date.
        weights_sha256: of the adapter.
        heads_left_out: heads that are not in the report, see `focus_hf.interpret.run.MOST_HEADS`.
        schema: version of this format.

    Raises:
        ValueError: the data does not fit the schema.
    """

    num_groups: int
    top_k: int
    text: dict[str, Any]
    layers: list[LayerFacts]
    bands: list[int] = field(default_factory=lambda: [0])
    setting: str = ""
    strip: list[str] = field(default_factory=list)
    base_model: str | None = None
    attention_layers: int = 0
    routed_layers: int = 0
    seed: int = 0
    measured_with: dict[str, str] = field(default_factory=dict)
    weights_sha256: str = ""
    heads_left_out: int = 0
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            todo = "upgrade focus_hf" if self.schema > SCHEMA else "make it again: focus-hf groups --write"
            raise ValueError(f"This group report has schema {self.schema}, expected {SCHEMA}; {todo}")
        for layer in self.layers:
            count = len(layer.groups)
            if count != self.num_groups:
                raise ValueError(f"{layer.name} has {count} groups in the report, expected {self.num_groups}.")
            total = sum(group.share for group in layer.groups)
            if not 0.99 <= total <= 1.01:
                raise ValueError(f"Shares of the groups of {layer.name} add up to {total:.3f}, expected 1.")
            for table in (layer.reads, layer.attention):
                if table and [len(row) for row in table] != [len(self.bands)] * self.num_groups:
                    raise ValueError(
                        f"{layer.name} should tell of {self.num_groups} groups in {len(self.bands)} bands."
                    )

    @property
    def labels(self) -> list[str]:
        """What groups of any layer are about, each once, most frequent first."""
        found = Counter(group.name for layer in self.layers for group in layer.groups)
        return [name for name, _ in found.most_common() if name not in NAMELESS]

    def that_matter(self, count: int = 10) -> list[LayerFacts]:
        """The heads or layers without whose distant reading the model loses most; where that was not measured, those
        with most distant attention."""

        def key(layer: LayerFacts) -> tuple[float, float]:
            return (-1.0 if layer.loss is None else layer.loss), layer.far

        return sorted((layer for layer in self.layers if layer.far > 0), key=key, reverse=True)[:count]

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
            ValueError: it is not one, or of another schema.
            OSError: it cannot be read.
        """
        path = Path(source)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            found, schema = values.pop("layers"), values.get("schema", 0)
            if schema != SCHEMA:  # an older one has other entries
                cls(0, 0, {}, [], schema=schema)
            layers = [LayerFacts(**layer | {"groups": [GroupFacts(**g) for g in layer["groups"]]}) for layer in found]
            if unknown := values.keys() - {f.name for f in fields(cls)}:
                raise ValueError(f"unknown entry {sorted(unknown)[0]!r}")
            for record in (*(group for layer in layers for group in layer.groups), *layers):
                check_types(record)
            report = cls(layers=layers, **values)
            check_types(report)
            return report
        except (TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a group report that can be read: {one_line(str(error))}") from None

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> GroupReport | None:
        """Read it from an adapter's folder, see `from_json`; ``None`` if there is none."""
        path = Path(folder) / GROUPS_FILE
        return cls.from_json(path) if path.is_file() else None

    def to_markdown(self, figures: Collection[str] = ()) -> str:
        """The report as Markdown for a card; everything from outside is escaped.

        Args:
            figures: pictures that lie beside it, see `focus_hf.records.group_markdown.picture`.
        """
        return render(self, figures)
