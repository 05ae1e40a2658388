"""Whether a record read from a file holds what its annotations say: JSON of a stranger's holds anything."""

from __future__ import annotations

import types
from dataclasses import fields
from typing import Any, get_args, get_origin, get_type_hints

from ..escape import shown

#: No measurement is larger; JSON can spell integers that floating point cannot hold.
_LARGEST = 2**63


def check_types(record: Any) -> None:
    """Raise `ValueError` for a field of a dataclass that, by its annotation, holds something else in it, or a number
    that is not finite; names it."""
    hints = get_type_hints(type(record))
    for field in fields(record):
        value = getattr(record, field.name)
        if not _holds(value, hints[field.name]):
            expected = str(field.type).replace("Any", "values")
            raise ValueError(f"{field.name} should be {expected}, got {shown(value)}")


def _holds(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    if isinstance(hint, types.UnionType):
        return any(_holds(value, option) for option in get_args(hint))
    if get_origin(hint) is list:
        (inside,) = get_args(hint)
        return isinstance(value, list) and all(_holds(item, inside) for item in value)
    if get_origin(hint) is dict:
        key, inside = get_args(hint)
        return isinstance(value, dict) and all(_holds(k, key) and _holds(v, inside) for k, v in value.items())
    if hint in (int, float):
        return is_number(value) and (hint is float or isinstance(value, int))
    return isinstance(value, hint)


def is_number(value: Any) -> bool:
    """Whether something is a finite number of a size that can be measured."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST
