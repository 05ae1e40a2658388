"""What a Focus adapter is set to: fields, their defaults and their ranges. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .escape import shown
from .setting_rules import FORMAT_VERSION, GATE_NAMES, REACHES, ROUTINGS, RULES, is_integer


@dataclass(frozen=True)
class HeadPattern:
    """How one key/value head attends.

    Args:
        attend: one of `REACHES`.
        local_window: its ``w``; not looked at where it attends to everything.
        top_k: groups that its queries read; only looked at where it attends by groups.
    """

    attend: str
    local_window: int
    top_k: int


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
    head_patterns: dict[str, dict[str, Any]] | None = field(
        default=None, metadata={"help": "How single key/value heads attend, by 'LAYER.HEAD'."}
    )
    budgets: dict[str, dict[str, dict[str, Any]]] | None = field(
        default=None, metadata={"help": "Other head_patterns to choose from, by their share of pairs."}
    )
    hidden_size: int | None = field(default=None, metadata={"help": "Width of the base model (filled in)."})
    layers: list[int] | None = field(default=None, metadata={"help": "Routed layers (filled in)."})
    key_value_heads: int | None = field(default=None, metadata={"help": "Key/value heads of a layer (filled in)."})
    tokenizer_revision: str | None = field(default=None, metadata={"help": "Commit of the tokenizer (filled in)."})
    format_version: int = field(default=FORMAT_VERSION, metadata={"help": "Version of this file's format."})

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self.__dict__.pop("_made", None)

    @property
    def version(self) -> object:
        """Another one whenever a setting was given another value."""
        return self.__dict__.setdefault("_made", {})

    def once(self, name: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """What follows from the settings, made once: every layer asks at every token. Made anew when a setting was
        given another value; tables are replaced, not changed in place.

        Args:
            name: of what is made.
            make: makes it.
        """
        made = self.__dict__.setdefault("_made", {})
        if name not in made:
            made[name] = make()
        return made[name]

    @property
    def training_sharpness(self) -> float | None:
        """Spread of the scores in training's softmax; ``None``: what the temperature makes of it."""
        return self.sharpness if self.gate == "hard" else None

    @property
    def plain(self) -> bool:
        """Whether all heads of all layers attend alike."""
        return self.routing == "shared" and not self.head_patterns

    def head_pattern(self, layer: int, head: int) -> HeadPattern:
        """How a key/value head attends: as ``head_patterns`` says, or by groups like all others."""
        own = (self.head_patterns or {}).get(f"{layer}.{head}", {})
        return HeadPattern(
            own.get("attend", "groups"), own.get("local_window", self.local_window), own.get("top_k", self.top_k)
        )

    def patterns_in_force(self) -> list[HeadPattern]:
        """How each key/value head of each routed layer attends; empty before an adapter is on a model."""
        return [
            self.head_pattern(layer, head) for layer in self.layers or () for head in range(self.key_value_heads or 0)
        ]

    @property
    def heads_by_reach(self) -> dict[str, int]:
        """How many key/value heads attend by groups, to a window and sinks alone, and to everything."""
        patterns = self.patterns_in_force()
        return {reach: sum(pattern.attend == reach for pattern in patterns) for reach in REACHES}

    @property
    def top_ks(self) -> list[int]:
        """The numbers of groups that are in force, ascending: of heads that attend by groups."""
        own = [] if self.plain else [how.top_k for how in self.patterns_in_force() if how.attend == "groups"]
        return sorted(set(own)) or [self.top_k]

    @property
    def dense_length(self) -> int:
        """Contexts of at most this many tokens are the base model's own attention in all heads."""
        own = [] if self.plain else [how for how in self.patterns_in_force() if how.attend != "everything"]
        window = min((how.local_window for how in own), default=self.local_window)
        return max(window + 1, self.dense_below)

    @property
    def has_soft_attention(self) -> bool:
        """Whether training computed another function than inference does: soft gates, for heads that attend alike."""
        return self.gate != "hard" and self.plain

    def heads_with_groups(self, layer: int) -> tuple[int, ...]:
        """The key/value heads of a layer that attend by groups under some budget: those that have centroids of their
        own with ``routing="per_head"``."""
        found: tuple[int, ...] = self.once(("heads with groups", layer), lambda: self._heads_with_groups(layer))
        return found

    def _heads_with_groups(self, layer: int) -> tuple[int, ...]:
        tables = [self.head_patterns or {}, *(self.budgets or {}).values()]
        return tuple(
            head
            for head in range(self.key_value_heads or 0)
            if any(table.get(f"{layer}.{head}", {}).get("attend", "groups") == "groups" for table in tables)
        )

    def tensor_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """The shapes of a layer's own tensors by name; none for a layer without groups."""
        width, groups, dim = int(self.hidden_size or 0), self.num_groups, self.group_dim
        if self.routing == "shared":
            return {"focus_proj": (dim, width), "focus_centroids": (groups, dim), "focus_balance": (groups,)}
        if not (heads := len(self.heads_with_groups(layer))):
            return {}
        return {
            "focus_proj": (heads, dim, width),
            "focus_query_proj": (heads, dim, width),
            "focus_centroids": (heads, groups, dim),
            "focus_balance": (heads, groups),
            "focus_query_bias": (heads, groups),
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
    tables = [values.get("head_patterns") or {}, *(values.get("budgets") or {}).values()]
    for name, pattern in (item for table in tables for item in table.items()):
        if pattern.get("top_k", 1) > num_groups:
            raise ValueError(
                f"{where}: top_k of head {name} ({pattern['top_k']}) cannot exceed num_groups ({num_groups})."
            )
