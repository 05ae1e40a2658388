"""The YAML block at the start of a Markdown page, written by anybody: bounded, and plain values only.

A few lines of YAML can stand for billions of values, ask for Python objects, or nest deeper than a parser's stack, so
it is looked over as a stream of events before anything is built from it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from datetime import date
from typing import Any

import yaml

#: Characters of a block. The largest cards of the Hub, with the results of hundreds of benchmarks, have a few hundred
#: thousand; reading as many takes about a second.
MAX_CHARACTERS = 512 * 1024

#: Values, once references are followed. Lists of benchmark results have a few thousand.
MAX_VALUES = 50_000
_TOO_MANY = f"the metadata holds more than {MAX_VALUES:,} values"

#: Lists and mappings inside one another: libyaml's composer overflows the stack at some thousands, nobody writes 50.
MAX_DEPTH = 50

#: Characters of a number: ``1:2:3...`` is one in base 60, whose reading takes time that grows with its square.
MAX_DIGITS = 400

_BLOCK = re.compile(r"\A---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)


def split_card(text: str) -> tuple[str, str]:
    """The block at the start of a page, empty if there is none, and the rest of the page."""
    match = _BLOCK.match(text)
    return (match[1], text[match.end() :]) if match else ("", text)


def card_metadata(text: str) -> dict[str, Any]:
    """The metadata at the start of a page, as JSON can hold it; empty if there is none. `ValueError` if it is not
    valid YAML, not a mapping, or larger than this module's bounds."""
    found = read_yaml(split_card(text)[0])
    if not isinstance(found, dict | None):
        raise ValueError("the metadata must be a mapping of names to values")
    return found or {}


def read_yaml(block: str) -> Any:
    """What a stranger's YAML says, as JSON can hold it; `ValueError` if it is not valid, or larger than this module's
    bounds."""
    if len(block) > MAX_CHARACTERS:
        raise ValueError(f"the metadata has {len(block):,} characters, more than {MAX_CHARACTERS:,}")
    try:
        _check_size(block)
        return _plain(yaml.load(block, Loader=_Loader), itertools.count())
    except Exception as error:  # where a tag does not fit its value, PyYAML fails in many ways, such as KeyError
        raise ValueError(" ".join(str(error).split())[:300] or repr(error)) from None


def strings(value: Any) -> list[str]:
    """The texts in what metadata says, where one may stand for itself."""
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]


def _check_size(block: str) -> None:
    depth = values = 0
    for event in yaml.parse(block, Loader=_Loader):
        values += isinstance(event, yaml.NodeEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"the metadata is nested more than {MAX_DEPTH} levels deep")
        if values > 2 * MAX_VALUES:  # names and values
            raise ValueError(_TOO_MANY)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """libyaml's parser and the safe constructors, without what takes exponential or quadratic time."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merge keys (``<<``) stay unread: merging what was merged before doubles with every line."""

    def number(self, node: yaml.ScalarNode) -> float:
        if len(str(node.value)) > MAX_DIGITS:
            raise yaml.YAMLError(f"a number of {len(node.value):,} digits is longer than {MAX_DIGITS}")
        is_whole = node.tag == "tag:yaml.org,2002:int"
        return self.construct_yaml_int(node) if is_whole else self.construct_yaml_float(node)


for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader.number)


def _plain(value: Any, counter: Iterator[int], depth: int = 0) -> Any:
    """What JSON can hold of what YAML can; ``counter`` counts the values, once references are followed."""
    if next(counter) >= MAX_VALUES or depth > MAX_DEPTH:
        raise ValueError(_TOO_MANY)
    if isinstance(value, dict):
        return {_text(key): _plain(item, counter, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item, counter, depth + 1) for item in value]
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, int) and abs(value) >= 2**63:
        return float(value) if abs(value) < 2**1000 else None
    return value if value is None or isinstance(value, bool | int | float) else _text(value)


def _text(value: object) -> str:
    """Text that can be stored: YAML can spell half of a pair of characters."""
    return str(value).encode("utf-8", "replace").decode()
