"""Flags that several commands have, and those made from the fields of a dataclass: each is described in one place."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

_DEVICE = "Where: cpu, cuda, cuda:1 ..."
_DEVICE_MAP = "Instead of --device: auto, balanced, ... spread the model over all devices (accelerate)."
_REVISION = "Revision of the adapter on the Hub."

Adapter = Annotated[str, typer.Option(help="The adapter: a folder or a Hub id.")]
Revision = Annotated[str | None, typer.Option(help=_REVISION)]
Device = Annotated[str, typer.Option(help=_DEVICE)]
DeviceMap = Annotated[str | None, typer.Option(help=_DEVICE_MAP)]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
JsonFile = Annotated[str | None, typer.Option("--json", help="Write JSON: a file, or - for the screen.")]
Config = Annotated[Path | None, typer.Option(help="YAML file of the flags below.", exists=True, dir_okay=False)]

#: Of a card that is made.
NamedBase = Annotated[str | None, typer.Option(help="Hub id of the base model, if it was a folder.")]
License = Annotated[str | None, typer.Option(help="Licence of the adapter; the base model's by default.")]


def _field(default: Any, help: str, **more: Sequence[str]) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, **more})


@dataclasses.dataclass
class Placement:
    """Which model an adapter is put into, and where: of commands that load one, for `flags_of`."""

    base: str | None = _field(None, "Base model, if not the one that the adapter names.", flags=("--model", "--base"))
    revision: str | None = _field(None, _REVISION)
    device: str = _field("cpu", _DEVICE)
    device_map: str | None = _field(None, _DEVICE_MAP)
    dtype: str = _field("auto", "Of the model's weights: auto (its own), float32, bfloat16, float16.")


def placed(given: dict[str, Any]) -> dict[str, Any]:
    """The flags of a `Placement`, for `focus_hf.hub.load_adapted`; a place that is not there is refused at once."""
    from ..placement import check_placement

    check_placement(**{name: given[name] for name in given.keys() & {"device", "device_map", "dtype"}})
    return given


_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def flags_of(recipe: type) -> Callable[[Callable], Callable]:
    """Decorator: give a command a flag for every field of a dataclass, described by the field's ``help``.

    The command's ``given`` is a mapping of those that were on the command line. A field that is a mapping becomes a
    flag that takes ``name=value`` and may be repeated; one that has ``flags`` is called by them.

    Args:
        recipe: the dataclass.
    """
    hints = typing.get_type_hints(recipe)
    flags = [_flag(field, hints[field.name]) for field in dataclasses.fields(recipe)]
    mappings = [name for name, hint in hints.items() if typing.get_origin(hint) is dict]

    def decorate(command: Callable) -> Callable:
        @functools.wraps(command)
        def wrapped(**values: Any) -> None:
            found = {flag.name: values.pop(flag.name) for flag in flags}
            given = {name: value for name, value in found.items() if value not in (None, [])}
            for name in given.keys() & mappings:
                given[name] = named_values(f"--{name.replace('_', '-')}", given[name])
            command(given=given, **values)

        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [*(p.replace(kind=_KEYWORD) for p in own if p.name != "given"), *flags]
        wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return wrapped

    return decorate


def _flag(field: dataclasses.Field, hint: Any) -> inspect.Parameter:
    if isinstance(hint, types.UnionType):
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    if typing.get_origin(hint) is dict:
        hint = list[str]
    text = field.metadata.get("help", "")
    if field.default not in (dataclasses.MISSING, None, "", False):
        text = f"{text} [default: {field.default}]"
    name = field.name.replace("_", "-")
    flag = f"--{name}/--no-{name}" if hint is bool else f"--{name}"  # a file's true can be taken back
    option = typer.Option(*field.metadata.get("flags", [flag]), help=text.replace("[", "\\["), show_default=False)
    return inspect.Parameter(field.name, _KEYWORD, default=None, annotation=Annotated[hint | None, option])


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
