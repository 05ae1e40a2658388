"""What each field of an adapter's configuration may hold. Needs no torch."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: Version of the adapter file format that this package writes; it reads this one and older ones.
FORMAT_VERSION = 1

#: What ``gate`` may be: the gates of `focus_hf.attention`, by name.
GATE_NAMES = ("hard", "additive", "multiplicative")

#: What ``routing`` may be: one routing for all heads of a layer, or one for each key/value head.
ROUTINGS = ("shared", "cells")

#: Groups that a key/value head may have: the group of a key is a byte.
MAX_CELL_GROUPS = 256

#: Sets of groups that tokens of a shared routing may be in: a query's table of what it reads has so many entries.
MAX_SETS = 4096


def num_sets(num_groups: int, top_k: int) -> int:
    """Sets of ``top_k`` groups: C(K, top_k)."""
    return math.comb(num_groups, top_k)


@dataclass(frozen=True)
class Rule:
    """What a field may hold: in words, and as a test."""

    expected: str
    holds: Callable[[Any], bool]

    def or_none(self) -> Rule:
        return Rule(f"{self.expected}, or null", lambda value: value is None or self.holds(value))


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(low: int, high: int) -> Rule:
    return Rule(f"an integer from {low:,} to {high:,}", lambda value: is_integer(value) and low <= value <= high)


def _number(low: float, high: float) -> Rule:
    return Rule(
        f"a number from {low:g} to {high:,.0f}",
        lambda value: (is_integer(value) or isinstance(value, float)) and low <= value <= high,
    )


def _text(length: int) -> Rule:
    return Rule(
        f"a text of at most {length:,} printable characters",
        lambda value: isinstance(value, str | os.PathLike) and len(str(value)) <= length and str(value).isprintable(),
    )


def _list_of(rule: Rule, length: int, what: str) -> Rule:
    return Rule(
        f"a list of at most {length:,} {what}",
        lambda value: (
            isinstance(value, list | tuple | set) and len(value) <= length and all(rule.holds(item) for item in value)
        ),
    )


#: Longest pattern (regular expression) for names of modules.
MAX_PATTERN = 500

#: What takes time or memory without end in a regular expression: a group that is counted, long counts, recursion.
_ENDLESS = re.compile(r"\)\s*\{|\{[^{}]*\d{3}|\(\?(?!:|=|!|<=|<!|P<)|\(\?P[>=]|\{[^{}]*[^\d,{}]")


def _is_pattern(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_PATTERN and value.isprintable() and not _ENDLESS.search(value)


def _modules() -> Rule:
    names = _list_of(_text(200), 4096, "module names")
    return Rule(
        f"{names.expected}, or a pattern of up to {MAX_PATTERN} characters (no recursion, counted group or count over "
        "99)",
        lambda value: _is_pattern(value) or names.holds(value),
    ).or_none()


#: Tokens that a window, a start or the sinks may span: so many that their sums still fit into 32 bits.
_MAX_TOKENS = 2**29

#: PEFT's kinds of tasks.
TASK_TYPES = ("SEQ_CLS", "SEQ_2_SEQ_LM", "CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION")

_FLAG = Rule("true or false", lambda value: isinstance(value, bool))

#: Curves that an adapter may have, and points of a curve.
_MAX_CURVES, _MAX_POINTS = 32, 64


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


_LAYERS = _list_of(_integer(0, 9999), 4096, "layer numbers")

#: What each field of an adapter's configuration may hold, by name.
RULES = {
    "routing": Rule(f"one of {', '.join(ROUTINGS)}", lambda value: isinstance(value, str) and value in ROUTINGS),
    "num_bands": _integer(1, 24),
    "threshold": _number(-1e6, 1e6),
    "pairs": _number(0, 1).or_none(),
    "pairs_curves": Rule(
        'a mapping from positions, such as "4096", to [threshold, share of pairs], shares rising, thresholds falling',
        _are_curves,
    ).or_none(),
    "num_groups": _integer(1, 1024),
    "top_k": _integer(1, 1024),
    "local_window": _integer(0, _MAX_TOKENS),
    "sink_tokens": _integer(0, _MAX_TOKENS),
    "dense_below": _integer(0, _MAX_TOKENS),
    "group_dim": _integer(1, 1024),
    "temperature": _number(1e-6, 1e6),
    "sinkhorn_iterations": _integer(1, 1000),
    "gate": Rule(f"one of {', '.join(GATE_NAMES)}", lambda value: isinstance(value, str) and value in GATE_NAMES),
    "sharpness": _number(1e-6, 1e6),
    "gate_strength": _number(0, 1e6),
    "straight_through": _FLAG,
    "hidden_size": _integer(1, 2**20).or_none(),
    "key_value_heads": _integer(1, 9999).or_none(),
    "query_heads": _integer(1, 9999).or_none(),
    "head_dim": _integer(1, 4096).or_none(),
    "layers": Rule(
        "an ascending list of at most 4,096 layer numbers",
        lambda value: _LAYERS.holds(value) and sorted(set(value)) == list(value),
    ).or_none(),
    "tokenizer_revision": _text(200).or_none(),
    "format_version": _integer(1, FORMAT_VERSION),
    "target_modules": _modules(),
    "exclude_modules": _modules(),
    "include_sliding_layers": _FLAG,
    "base_model_name_or_path": _text(4096).or_none(),  # from here on: PEFT's own
    "revision": _text(200).or_none(),
    "task_type": Rule(
        f"one of {', '.join(TASK_TYPES)}", lambda value: isinstance(value, str) and value in TASK_TYPES
    ).or_none(),
    "peft_version": _text(200).or_none(),
    "inference_mode": _FLAG,
    "auto_mapping": Rule(
        "a mapping of at most 10 texts",
        lambda value: (
            isinstance(value, dict)
            and len(value) <= 10
            and all(_text(200).or_none().holds(text) for item in value.items() for text in item)
        ),
    ).or_none(),
}
