"""A recipe's values from a YAML file and from flags."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

#: Where the text to learn from is.
_TEXT = ("train_file", "dataset", "subset", "split", "revision", "column")


def recipe_values(
    recipe: type, file: str | os.PathLike[str] | None, given: dict[str, Any], hint: str = ""
) -> dict[str, Any]:
    """A YAML file's values, and over them those given otherwise (flags).

    Another text than the file's replaces everything that the file says about where its text is.

    Args:
        recipe: the dataclass that they are for.
        file: YAML, or ``None``.
        given: by name.
        hint: what to say to whoever gives an unknown name.

    Raises:
        ValueError: the file is not a mapping of known names, or model or output_dir is missing.
    """
    values = {} if file is None else read_yaml(file, recipe)
    if given.keys() & {"train_file", "dataset"}:
        values = {name: value for name, value in values.items() if name not in _TEXT}
    values.update(given)
    if unknown := sorted(values.keys() - {f.name for f in dataclasses.fields(recipe)}):
        raise ValueError(f"Unknown option {unknown[0]!r}. {hint}".rstrip())
    for name in ("model", "output_dir"):
        if not values.get(name):
            raise ValueError(f"{name} is missing: give --{name.replace('_', '-')} or set it in the YAML file.")
    return values


def read_yaml(file: str | os.PathLike[str], recipe: type) -> dict[str, Any]:
    """A YAML file as a mapping; hyphens in names count as underscores.

    Args:
        file: the file.
        recipe: the dataclass whose fields say what is a number.

    Raises:
        ValueError: it is not one.
    """
    import yaml

    try:
        values = yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{file} must hold names and values, got {type(values).__name__}.")
    values = {str(name).replace("-", "_"): value for name, value in values.items()}
    hints = {f.name: str(f.type) for f in dataclasses.fields(recipe)}
    for name, value in values.items():
        if isinstance(value, str) and hints.get(name, "").startswith("float"):
            values[name] = _number(name, value)  # YAML 1.1 reads 1e-3 as text
    return values


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{name} must be a number, got {value!r}.") from None


def check_integer(name: str, value: Any, minimum: int) -> None:
    """Raise `ValueError` if a value is no whole number of at least ``minimum``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}, got {value!r}.")
