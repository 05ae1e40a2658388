"""What a Focus adapter is set to: fields, their defaults and their ranges. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .escape import shown
from .setting_rules import FORMAT_VERSION, GATE_NAMES, MAX_CELL_GROUPS, MAX_SETS, ROUTINGS, RULES, is_integer, num_sets


@dataclass
class FocusSettings:
    """The part of ``adapter_config.json`` that is Focus' own, see `focus_hf.FocusConfig` for what each field means."""

    num_groups: int = field(default=8, metadata={"help": "Groups per layer (K)."})
    top_k: int = field(default=1, metadata={"help": "Groups per token at inference (k)."})
    local_window: int = field(default=128, metadata={"help": "Distance up to which all pairs are attended (w)."})
    sink_tokens: int = field(default=4, metadata={"help": "First tokens that belong to every group."})
    dense_below: int = field(default=0, metadata={"help": "Positions below it attend to everything before them."})
    group_dim: int = field(default=16, metadata={"help": "Dimension of the centroids (d_g)."})
    temperature: float = field(default=0.1, metadata={"help": "Temperature of the scores (tau)."})
    sinkhorn_iterations: int = field(default=10, metadata={"help": "Rounds of Sinkhorn in training."})
    gate: str = field(default="hard", metadata={"help": f"Gate in training: {', '.join(GATE_NAMES)}."})
    sharpness: float = field(default=2.0, metadata={"help": "Spread of the scores in training with a hard gate."})
    gate_strength: float = field(default=8.0, metadata={"help": "Strength of a soft gate in training (lambda)."})
    straight_through: bool = field(default=False, metadata={"help": "Hard memberships forward, soft gradients."})
    routing: str = field(default="shared", metadata={"help": f"Who has groups of its own: {', '.join(ROUTINGS)}."})
    num_bands: int = field(default=6, metadata={"help": "Bands of distance, with routing by cells."})
    threshold: float = field(default=-7.0, metadata={"help": "Queries read cells above it, with routing by cells."})
    pairs: float | None = field(default=None, metadata={"help": "Share of pairs, in the place of a threshold."})
    pairs_curves: dict[str, list[list[float]]] | None = field(
        default=None, metadata={"help": "Share of pairs by threshold, measured at several positions."}
    )
    hidden_size: int | None = field(default=None, metadata={"help": "Width of the base model (filled in)."})
    layers: list[int] | None = field(default=None, metadata={"help": "Routed layers (filled in)."})
    key_value_heads: int | None = field(default=None, metadata={"help": "Key/value heads of a layer (filled in)."})
    query_heads: int | None = field(default=None, metadata={"help": "Query heads of a layer (filled in)."})
    head_dim: int | None = field(default=None, metadata={"help": "Size of a head (filled in)."})
    tokenizer_revision: str | None = field(default=None, metadata={"help": "Commit of the tokenizer (filled in)."})
    format_version: int = field(default=FORMAT_VERSION, metadata={"help": "Version of this file's format."})

    @property
    def training_sharpness(self) -> float | None:
        """Spread of the scores in training's softmax; ``None``: what the temperature makes of it."""
        return self.sharpness if self.gate == "hard" else None

    @property
    def by_cells(self) -> bool:
        """Whether each key/value head routes by itself."""
        return self.routing == "cells"

    @property
    def is_dense(self) -> bool:
        """Whether any two tokens share a group, whatever the groups."""
        return not self.by_cells and 2 * self.top_k > self.num_groups

    @property
    def dense_length(self) -> int:
        """Contexts of at most this many tokens are the base model's own attention."""
        return max(self.local_window + 1, self.dense_below)

    @property
    def has_soft_attention(self) -> bool:
        """Whether training computed another function than inference does: soft gates."""
        return self.gate != "hard" and not self.by_cells

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of a layer's own tensors by name."""
        groups, dim = self.num_groups, self.group_dim
        if not self.by_cells:
            return {
                "focus_proj": (dim, int(self.hidden_size or 0)),
                "focus_centroids": (groups, dim),
                "focus_balance": (groups,),
            }
        heads, size = int(self.key_value_heads or 0), int(self.head_dim or 0)
        width = int(self.query_heads or 0) // max(heads, 1) * size
        return {
            "focus_key_proj": (heads, dim, size),
            "focus_centroids": (heads, groups, dim),
            "focus_balance": (heads, groups),
            "focus_query_proj": (heads, dim, width),
            "focus_band_proj": (heads, self.num_bands + 1, width),
            "focus_cell_bias": (heads, groups * self.num_bands + 1),
            "focus_offset": (heads,),
        }

    def validate(self, where: str = "FocusConfig") -> None:
        """Raise `ValueError` for the first value that cannot be, naming it and what was expected.

        Args:
            where: what to call the place in which the values stand.
        """
        check_fields(vars(self), where)


def check_fields(values: Mapping[str, Any], where: str) -> None:
    """Check the fields of an adapter's configuration, PEFT's own among them, before anything is made of them.

    Args:
        values: by name; names that are not known here are not looked at.
        where: the file or class in which they stand.

    Raises:
        ValueError: one line, for the first value of a wrong type or out of range.
    """
    version = values.get("format_version", FORMAT_VERSION)
    if is_integer(version) and version > FORMAT_VERSION:
        raise ValueError(
            f"{where}: format_version {shown(version)} is newer than the installed focus_hf, which reads up to "
            f"{FORMAT_VERSION}. Upgrade focus_hf."
        )
    for name, rule in RULES.items():
        if name in values and not rule.holds(values[name]):
            raise ValueError(f"{where}: {name} must be {rule.expected}, got {shown(values[name])}.")
    top_k, num_groups = (values.get(name, getattr(FocusSettings, name)) for name in ("top_k", "num_groups"))
    if top_k > num_groups:
        raise ValueError(
            f"{where}: top_k ({top_k}) cannot exceed num_groups ({num_groups}): a token belongs to at most all "
            f"groups. Use a top_k from 1 to {num_groups}."
        )
    routing = values.get("routing", FocusSettings.routing)
    if routing == "cells":
        if num_groups > MAX_CELL_GROUPS:
            raise ValueError(
                f"{where}: num_groups ({num_groups}) must be at most {MAX_CELL_GROUPS} with routing='cells'."
            )
    elif 2 * top_k <= num_groups and num_sets(num_groups, top_k) > MAX_SETS:
        raise ValueError(
            f"{where}: top_k={top_k} of num_groups={num_groups} makes {num_sets(num_groups, top_k):,} sets of groups, "
            f"of which there may be {MAX_SETS:,}. Use fewer groups or a smaller top_k."
        )
