"""What a Focus adapter is set to: fields, their defaults, and what each may hold. Needs no torch."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .escape import shown

#: Version of the adapter file format that this package writes; it reads this one and older ones.
FORMAT_VERSION = 1

#: What ``gate`` may be: the gates of `focus_hf.attention`, by name.
GATE_NAMES = ("hard", "additive", "multiplicative")

#: What ``routing`` may be: one routing for all heads of a layer, or one for each key/value head.
ROUTINGS = ("shared", "cells")

#: PEFT's kinds of tasks.
TASK_TYPES = ("SEQ_CLS", "SEQ_2_SEQ_LM", "CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION")

#: Groups that a key/value head may have: the group of a key is a byte.
_MAX_CELL_GROUPS = 256

#: Sets of groups that tokens of a shared routing may be in: a query's table of what it reads has so many entries.
_MAX_SETS = 4096

#: Tokens that a window, a start or the sinks may span: so many that their sums still fit into 32 bits.
_MAX_TOKENS = 2**29

#: Curves that an adapter may have, and points of a curve.
_MAX_CURVES, _MAX_POINTS = 32, 64

#: Longest pattern (regular expression) for names of modules.
_MAX_PATTERN = 500

#: What takes time or memory without end in a regular expression: a group that is counted, long counts, recursion.
_ENDLESS = re.compile(r"\)\s*\{|\{[^{}]*\d{3}|\(\?(?!:|=|!|<=|<!|P<)|\(\?P[>=]|\{[^{}]*[^\d,{}]")


@dataclass(frozen=True)
class Rule:
    """What a field may hold: in words, and as a test."""

    expected: str
    holds: Callable[[Any], bool]

    def or_none(self) -> Rule:
        return Rule(f"{self.expected}, or null", lambda value: value is None or self.holds(value))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(low: int, high: int) -> Rule:
    return Rule(f"an integer from {low:,} to {high:,}", lambda value: _is_integer(value) and low <= value <= high)


def _number(low: float, high: float) -> Rule:
    return Rule(
        f"a number from {low:g} to {high:,.0f}",
        lambda value: (_is_integer(value) or isinstance(value, float)) and low <= value <= high,
    )


def _one_of(names: tuple[str, ...]) -> Rule:
    return Rule(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


def _text(length: int) -> Rule:
    return Rule(
        f"a text of at most {length:,} printable characters",
        lambda value: isinstance(value, str | os.PathLike) and len(str(value)) <= length and str(value).isprintable(),
    )


def _are(value: Any, rule: Rule) -> bool:
    """Whether this is a list, of not too many things that each hold."""
    return isinstance(value, list | tuple | set) and len(value) <= 4096 and all(rule.holds(item) for item in value)


def _are_modules(value: Any) -> bool:
    if not isinstance(value, str):
        return _are(value, _text(200))
    return len(value) <= _MAX_PATTERN and value.isprintable() and not _ENDLESS.search(value)


def _is_curve(points: Any) -> bool:
    number = _number(-1e6, 1e6).holds
    if not isinstance(points, list) or not 1 <= len(points) <= _MAX_POINTS:
        return False
    if not all(isinstance(point, list) and len(point) == 2 and all(number(x) for x in point) for point in points):
        return False
    return points == sorted(points, key=lambda point: (-point[0], point[1])) and points == sorted(
        points, key=lambda point: point[1]
    )


def _are_curves(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= _MAX_CURVES
        and all(isinstance(name, str) and re.fullmatch(r"[1-9]\d{0,8}", name) for name in value)
        and all(_is_curve(points) for points in value.values())
    )


def _is_small_mapping(value: Any) -> bool:
    text = _text(200).or_none().holds
    return isinstance(value, dict) and len(value) <= 10 and all(text(x) for item in value.items() for x in item)


_FLAG = Rule("true or false", lambda value: isinstance(value, bool))
_SIZE = _integer(1, 9999).or_none()
_TOKENS = _integer(0, _MAX_TOKENS)
_NAME = _text(200).or_none()
_LAYERS = Rule(
    "an ascending list of at most 4,096 layer numbers",
    lambda value: _are(value, _integer(0, 9999)) and sorted(set(value)) == list(value),
).or_none()
_CURVES = Rule(
    'a mapping from positions, such as "4096", to [threshold, share of pairs], shares rising, thresholds falling',
    _are_curves,
).or_none()
_MODULES = Rule(
    f"a list of at most 4,096 module names, or a pattern of up to {_MAX_PATTERN} characters (no recursion, counted "
    "group or count over 99)",
    _are_modules,
).or_none()


def _setting(default: Any, rule: Rule, help: str) -> Any:
    return field(default=default, metadata={"help": help, "rule": rule})


@dataclass
class FocusSettings:
    """The part of ``adapter_config.json`` that is Focus' own, see `focus_hf.FocusConfig` for what each field means."""

    num_groups: int = _setting(8, _integer(1, 1024), "Groups per layer (K).")
    top_k: int = _setting(1, _integer(1, 1024), "Groups per token at inference (k).")
    local_window: int = _setting(128, _TOKENS, "Distance up to which all pairs are attended (w).")
    sink_tokens: int = _setting(4, _TOKENS, "First tokens that belong to every group.")
    dense_below: int = _setting(0, _TOKENS, "Positions below it attend to everything before them.")
    group_dim: int = _setting(16, _integer(1, 1024), "Dimension of the centroids (d_g).")
    temperature: float = _setting(0.1, _number(1e-6, 1e6), "Temperature of the scores (tau).")
    sinkhorn_iterations: int = _setting(10, _integer(1, 1000), "Rounds of Sinkhorn in training.")
    gate: str = _setting("hard", _one_of(GATE_NAMES), f"Gate in training: {', '.join(GATE_NAMES)}.")
    sharpness: float = _setting(2.0, _number(1e-6, 1e6), "Spread of the scores in training with a hard gate.")
    gate_strength: float = _setting(8.0, _number(0, 1e6), "Strength of a soft gate in training (lambda).")
    straight_through: bool = _setting(False, _FLAG, "Hard memberships forward, soft gradients.")
    routing: str = _setting("shared", _one_of(ROUTINGS), f"Who has groups of its own: {', '.join(ROUTINGS)}.")
    num_bands: int = _setting(6, _integer(1, 24), "Bands of distance, with routing by cells.")
    each_query_head: bool = _setting(False, _FLAG, "Query heads choose cells each for itself, with routing by cells.")
    threshold: float = _setting(-7.0, _number(-1e6, 1e6), "Queries read cells above it, with routing by cells.")
    pairs: float | None = _setting(None, _number(0, 1).or_none(), "Share of pairs, in the place of a threshold.")
    pairs_curves: dict[str, list[list[float]]] | None = _setting(
        None, _CURVES, "Share of pairs by threshold, measured at several positions."
    )
    hidden_size: int | None = _setting(None, _integer(1, 2**20).or_none(), "Width of the base model (filled in).")
    layers: list[int] | None = _setting(None, _LAYERS, "Routed layers (filled in).")
    key_value_heads: int | None = _setting(None, _SIZE, "Key/value heads of a layer (filled in).")
    query_heads: int | None = _setting(None, _SIZE, "Query heads of a layer (filled in).")
    head_dim: int | None = _setting(None, _integer(1, 4096).or_none(), "Size of a head (filled in).")
    tokenizer_revision: str | None = _setting(None, _NAME, "Commit of the tokenizer (filled in).")
    format_version: int = _setting(FORMAT_VERSION, _integer(1, FORMAT_VERSION), "Version of this file's format.")

    @property
    def training_sharpness(self) -> float | None:
        """Spread of the scores in training's softmax; ``None``: what the temperature makes of it."""
        return self.sharpness if self.gate == "hard" else None

    @property
    def by_cells(self) -> bool:
        """Whether each key/value head routes by itself."""
        return self.routing == "cells"

    @property
    def choosers(self) -> int:
        """With cells: who chooses what is read, the query heads of a key/value head together or each for itself."""
        return int((self.query_heads if self.each_query_head else self.key_value_heads) or 0)

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
        heads, size, choosers = int(self.key_value_heads or 0), int(self.head_dim or 0), self.choosers
        width = int(self.query_heads or 0) // max(choosers, 1) * size
        return {
            "focus_key_proj": (heads, dim, size),
            "focus_centroids": (heads, groups, dim),
            "focus_balance": (heads, groups),
            "focus_query_proj": (choosers, dim, width),
            "focus_band_proj": (choosers, self.num_bands + 1, width),
            "focus_cell_bias": (choosers, groups * self.num_bands + 1),
            "focus_offset": (choosers,),
        }

    def validate(self, where: str = "FocusConfig") -> None:
        """Raise `ValueError` for the first value that cannot be, naming it and what was expected.

        Args:
            where: what to call the place in which the values stand.
        """
        check_fields(vars(self), where)


#: What each field of an adapter's configuration may hold, by name.
_RULES: dict[str, Rule] = {own.name: own.metadata["rule"] for own in fields(FocusSettings)} | {
    "target_modules": _MODULES,
    "exclude_modules": _MODULES,
    "include_sliding_layers": _FLAG,
    "base_model_name_or_path": _text(4096).or_none(),  # from here on: PEFT's own
    "revision": _NAME,
    "task_type": _one_of(TASK_TYPES).or_none(),
    "peft_version": _NAME,
    "inference_mode": _FLAG,
    "auto_mapping": Rule("a mapping of at most 10 texts", _is_small_mapping).or_none(),
}


def check_fields(values: Mapping[str, Any], where: str) -> None:
    """Check the fields of an adapter's configuration, PEFT's own among them, before anything is made of them.

    Args:
        values: by name; names that are not known here are not looked at.
        where: the file or class in which they stand.

    Raises:
        ValueError: one line, for the first value of a wrong type or out of range.
    """
    version = values.get("format_version", FORMAT_VERSION)
    if _is_integer(version) and version > FORMAT_VERSION:
        raise ValueError(
            f"{where}: format_version {shown(version)} is newer than the installed focus_hf, which reads up to "
            f"{FORMAT_VERSION}. Upgrade focus_hf."
        )
    for name, rule in _RULES.items():
        if name in values and not rule.holds(values[name]):
            raise ValueError(f"{where}: {name} must be {rule.expected}, got {shown(values[name])}.")
    top_k, num_groups, routing = (
        values.get(name, getattr(FocusSettings, name)) for name in ("top_k", "num_groups", "routing")
    )
    if top_k > num_groups:
        raise ValueError(
            f"{where}: top_k ({top_k}) cannot exceed num_groups ({num_groups}): a token belongs to at most all "
            f"groups. Use a top_k from 1 to {num_groups}."
        )
    if routing == "cells":
        if num_groups > _MAX_CELL_GROUPS:
            raise ValueError(
                f"{where}: num_groups ({num_groups}) must be at most {_MAX_CELL_GROUPS} with routing='cells'."
            )
    elif 2 * top_k <= num_groups and (sets := math.comb(num_groups, top_k)) > _MAX_SETS:
        raise ValueError(
            f"{where}: top_k={top_k} of num_groups={num_groups} makes {sets:,} sets of groups, "
            f"of which there may be {_MAX_SETS:,}. Use fewer groups or a smaller top_k."
        )
