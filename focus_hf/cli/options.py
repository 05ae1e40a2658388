"""Flags made from the fields of a dataclass, so that each is described in one place."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from .flags import AsJson

#: Parameters of commands that are made from a recipe.
CONFIG = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[Path | None, typer.Option(help="YAML file of the flags below.", exists=True, dir_okay=False)],
)
JSON = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=AsJson)


def flags_of(recipe: type, *, more: Sequence[inspect.Parameter] = ()) -> Callable[[Callable], Callable]:
    """Decorator: give a command a flag for every field of a dataclass, described by the field's ``help``.

    The command gets ``given``, a mapping of the flags that were on the command line. A field that is a mapping becomes
    a flag that takes ``name=value`` and may be repeated.

    Args:
        recipe: the dataclass.
        more: further parameters of the command.
    """
    fields = [_parameter(field, hint) for field, hint in zip(dataclasses.fields(recipe), _hints(recipe), strict=True)]

    def decorate(command: Callable) -> Callable:
        names = {parameter.name for parameter in fields}

        def wrapped(**values: Any) -> None:
            given = {name: values.pop(name) for name in names if name in values}
            command(given={name: value for name, value in given.items() if value not in (None, [])}, **values)

        signature = inspect.Signature([*more, *fields])
        wrapped.__signature__ = signature  # type: ignore[attr-defined]
        wrapped.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
        wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
        return wrapped

    return decorate


def _hints(recipe: type) -> list[Any]:
    hints = typing.get_type_hints(recipe)
    return [hints[field.name] for field in dataclasses.fields(recipe)]


def _parameter(field: dataclasses.Field, hint: Any) -> inspect.Parameter:
    if isinstance(hint, types.UnionType):
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    if typing.get_origin(hint) is dict:
        hint = list[str]
    text = field.metadata.get("help", "")
    if field.default not in (dataclasses.MISSING, None, "", False):
        text = f"{text} [default: {field.default}]".replace("[", "\\[")
    name = field.name.replace("_", "-")
    flag = f"--{name}/--no-{name}" if hint is bool else f"--{name}"  # a file's true can be taken back
    option = typer.Option(flag, help=text, show_default=False)
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[hint | None, option]
    )


def named_values(option: str, pairs: Sequence[str]) -> dict[str, Any]:
    """``name=value`` pairs as a mapping, values read as YAML (numbers, true and false, lists).

    Raises:
        ValueError: one is no such pair.
    """
    import yaml

    values = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise ValueError(f"{option} takes name=value, got {pair!r}.")
        try:
            values[name.replace("-", "_")] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError(f"{option} {name}: cannot read the value {value!r}.") from None
    return values
