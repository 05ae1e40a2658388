"""What a whole run is told: a dataclass whose fields are the flags of a command and the keys of its YAML file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from .records.adapter_files import WEIGHTS_FILE
from .texts import TextSource

if TYPE_CHECKING:
    from .adapter import FocusConfig

#: Where the text to learn from is.
_TEXT = ("train_file", "dataset", "subset", "split", "revision", "column")


def option(help: str, default: Any = dataclasses.MISSING, at_least: int | None = None) -> Any:
    """A field of a recipe.

    Args:
        help: of its flag.
        default: its value, or what makes one, such as ``list``.
        at_least: for a whole number, or several of them: how small each may be.
    """
    kind = "default_factory" if callable(default) else "default"
    return dataclasses.field(metadata={"help": help, "at_least": at_least}, **{kind: default})


@dataclasses.dataclass
class Recipe:
    """What a fit and a training have in common.

    Raises:
        ValueError: a value is out of range.
    """

    model: str = option("Causal language model: a folder or a Hub id.")
    output_dir: str = option("Becomes the adapter's folder.")
    tokenizer: str | None = option("Tokenizer; the model's own by default.", None)
    train_file: list[str] = option("Text file (one document) or .jsonl file (one a line); may be repeated.", list)
    dataset: str | None = option("A data set instead of files: a name on the Hub, or a folder.", None)
    subset: str | None = option("Configuration of the data set.", None)
    split: str = option("Split of the data set, such as train[:1%].", "train")
    revision: str | None = option("Revision of the data set.", None)
    column: str = option("Column (or key of .jsonl lines) that holds the text.", "text")
    base_model: str | None = option("Hub id of the base model for the card, if the model is a folder.", None)
    device_map: str | None = option("How accelerate spreads the base model: auto, balanced, ... or a device.", None)
    dtype: str = option("Of the base model's weights: auto (its own), float32, bfloat16, float16.", "auto")
    gradient_checkpointing: bool = option("Compute activations again instead of keeping them.", False)
    seed: int = option("Of everything random.", 0)
    resume: bool = option("Go on with what an interrupted run has left.", False)
    overwrite: bool = option("Replace an adapter that is in output_dir.", False)

    #: What to say to whoever gives an unknown name.
    hint: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if str(field.type).startswith("list"):
                one = isinstance(value, str | os.PathLike) or not isinstance(value, Iterable)
                value = [] if value is None else [value] if one else list(value)
                setattr(self, field.name, value)
            if (least := field.metadata["at_least"]) is not None:
                for number in value if isinstance(value, list) else [value]:
                    if not isinstance(number, int) or isinstance(number, bool) or number < least:
                        raise ValueError(f"{field.name} must be an integer of at least {least}, got {number!r}.")
        self.focus_config()

    def focus_config(self, **values: Any) -> FocusConfig:
        """The adapter's configuration: what the recipe says, and over it ``values``."""
        from .adapter import FocusConfig  # registers with PEFT, which takes seconds to import

        names = {f.name for f in dataclasses.fields(FocusConfig)} & {f.name for f in dataclasses.fields(self)}
        given = {name: getattr(self, name) for name in names - {"revision"}}
        return FocusConfig(**{"task_type": "CAUSAL_LM", **given, **values})

    def training_source(self) -> TextSource:
        """Where the text to learn from is."""
        return TextSource(tuple(self.train_file), self.dataset, self.subset, self.split, self.revision, self.column)

    def check_output_dir(self) -> Path:
        """The folder to write to.

        Raises:
            ValueError: it is a file, or holds an adapter that is not to be replaced.
        """
        out = Path(self.output_dir)
        if out.exists() and not out.is_dir():
            raise ValueError(f"output_dir {out} is a file; name a folder.")
        if (out / WEIGHTS_FILE).exists() and not (self.resume or self.overwrite):
            raise ValueError(f"{out} already holds an adapter: choose another output_dir, or pass --overwrite.")
        return out

    @classmethod
    def from_values(cls, file: str | os.PathLike[str] | None, given: dict[str, Any]) -> Self:
        """A YAML file's values, and over them those given otherwise (flags).

        Another text than the file's replaces everything that the file says about where its text is.

        Raises:
            ValueError: the file is not a mapping of known names, or model or output_dir is missing.
        """
        values = {} if file is None else cls._read_yaml(file)
        if given.keys() & {"train_file", "dataset"}:
            values = {name: value for name, value in values.items() if name not in _TEXT}
        values.update(given)
        if unknown := sorted(values.keys() - {f.name for f in dataclasses.fields(cls)}):
            raise ValueError(f"Unknown option {unknown[0]!r}. {cls.hint}".rstrip())
        for name in ("model", "output_dir"):
            if not values.get(name):
                raise ValueError(f"{name} is missing: give --{name.replace('_', '-')} or set it in the YAML file.")
        return cls(**values)

    @classmethod
    def _read_yaml(cls, file: str | os.PathLike[str]) -> dict[str, Any]:
        """A YAML file as a mapping; hyphens in names count as underscores."""
        import yaml

        try:
            values = yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {}
        except yaml.YAMLError as error:
            raise ValueError(f"{file} is not valid YAML: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"{file} must hold names and values, got {type(values).__name__}.")
        values = {str(name).replace("-", "_"): value for name, value in values.items()}
        for field in dataclasses.fields(cls):
            if str(field.type).startswith("float") and isinstance(value := values.get(field.name), str):
                try:
                    values[field.name] = float(value)  # YAML 1.1 reads 1e-3 as text
                except ValueError:
                    raise ValueError(f"{field.name} must be a number, got {value!r}.") from None
        return values
