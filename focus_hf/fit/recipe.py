"""Everything a fit is told: one field for each flag of ``focus-hf fit`` and each key of its YAML file."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..recipe_values import check_integer, recipe_values
from ..texts import TextSource

if TYPE_CHECKING:
    from ..adapter import FocusConfig


def _option(help: str, default: Any = dataclasses.MISSING) -> Any:
    return field(default=default, metadata={"help": help})


def _several(help: str) -> Any:
    return field(default_factory=list, metadata={"help": help})


@dataclass
class FitRecipe:
    """A fit: fields are the flags of ``focus-hf fit``, which shows what each is for with ``--help``.

    Example:

    ```py
    >>> recipe = FitRecipe(model="org/base", train_file=["novel.txt", "code.txt"], output_dir="adapter")
    ```

    Raises:
        ValueError: a value is out of range.
    """

    model: str = _option("Causal language model: a folder or a Hub id.")
    output_dir: str = _option("Becomes the adapter's folder; fitted layers are kept in 'fit' inside it.")
    tokenizer: str | None = _option("Tokenizer; the model's own by default.", None)
    train_file: list[str] = _several(
        "Text file or .jsonl file; may be repeated, each gives as many windows. Many kinds are better than much."
    )
    dataset: str | None = _option("A data set instead of files: a name on the Hub, or a folder.", None)
    subset: str | None = _option("Configuration of the data set.", None)
    split: str = _option("Split of the data set, such as train[:1%].", "train")
    revision: str | None = _option("Revision of the data set.", None)
    column: str = _option("Column (or key of .jsonl lines) that holds the text.", "text")
    base_model: str | None = _option("Hub id of the base model for the card, if the model is a folder.", None)
    num_groups: int = _option("Groups per key/value head (K).", 128)
    group_dim: int = _option("Dimension of the centroids (d_g).", 12)
    local_window: int = _option("Distance up to which all pairs are attended (w).", 32)
    sink_tokens: int = _option("First tokens that every token may attend to.", 4)
    num_bands: int = _option("Bands of distance beyond the window, which double; the last one is open.", 7)
    dense_below: int = _option("Positions below it attend to everything before them; shorter prompts are dense.", 0)
    seq_len: list[int] = _several(
        "Tokens per window; may be repeated. The longest should be the length to be served. [default: 2048]"
    )
    windows: list[int] = _several("Windows to fit to, of each length. [default: 24]")
    dial_windows: list[int] = _several(
        "Further windows of each length, on which the dial is measured. [default: a third as many]"
    )
    rows: int = _option("Queries of a window that are looked at, spread over it.", 1024)
    steps: int = _option("Steps in which a layer's queries learn which cells to read.", 500)
    pairs: float = _option("Share of pairs that the adapter attends to until the dial is turned.", 0.25)
    seed: int = _option("Of everything random.", 0)
    gradient_checkpointing: bool = _option("Compute activations again instead of keeping them.", False)
    scratch_dir: str | None = _option("Where captured tensors wait; the system's temporary folder by default.", None)
    scratch_gb: float = _option("What they may take; what needs more is captured in several passes.", 16.0)
    device_map: str | None = _option("How accelerate spreads the base model: auto, balanced, ... or a device.", None)
    dtype: str = _option("Of the base model's weights: auto (its own), float32, bfloat16, float16.", "auto")
    resume: bool = _option("Use the layers that are fitted already.", False)
    overwrite: bool = _option("Replace an adapter that is in output_dir.", False)

    def __post_init__(self) -> None:
        for name in ("train_file", "seq_len", "windows", "dial_windows"):
            value = getattr(self, name)
            setattr(self, name, list(value) if isinstance(value, list | tuple) else [value])
        self.seq_len = self.seq_len or [2048]
        self.windows = self.windows or [24]
        self.dial_windows = self.dial_windows or [max(1, count // 3) for count in self.windows]
        self.validate()

    def validate(self) -> None:
        """Raise `ValueError` for the first value that is out of range."""
        for name in ("rows", "steps"):
            check_integer(name, getattr(self, name), 1)
        for name in ("seq_len", "windows", "dial_windows"):
            for value in getattr(self, name):
                check_integer(name, value, 1)
        for name in ("windows", "dial_windows"):
            if len(getattr(self, name)) != len(self.seq_len):
                raise ValueError(
                    f"seq_len names {len(self.seq_len)} lengths and {name} {len(getattr(self, name))} numbers of "
                    "windows: give a number for each length."
                )
        if isinstance(self.pairs, bool) or not isinstance(self.pairs, int | float) or not 0 < self.pairs <= 1:
            raise ValueError(f"pairs is a share of all pairs, above 0 and at most 1; got {self.pairs!r}.")
        shortest = 2 * (self.local_window + self.sink_tokens)
        if min(self.seq_len) < shortest:
            raise ValueError(
                f"A length of {min(self.seq_len)} leaves next to nothing beyond local_window ({self.local_window}) "
                f"and sink_tokens ({self.sink_tokens}). Use at least {shortest}."
            )
        if not isinstance(self.scratch_gb, int | float) or not self.scratch_gb > 0:
            raise ValueError(f"scratch_gb must be a positive number, got {self.scratch_gb!r}.")
        self.focus_config()

    @property
    def lengths(self) -> list[int]:
        """Of all windows: those to fit to, then those to measure the dial on."""
        counts = (*self.windows, *self.dial_windows)
        return [length for length, count in zip(2 * self.seq_len, counts, strict=True) for _ in range(count)]

    def focus_config(self, **values: Any) -> FocusConfig:
        """The adapter's configuration."""
        from ..adapter import FocusConfig  # registers with PEFT, which takes seconds to import

        names = ("num_groups", "group_dim", "local_window", "sink_tokens", "num_bands", "dense_below")
        values = {name: getattr(self, name) for name in names} | values
        return FocusConfig(routing="cells", task_type="CAUSAL_LM", **values)

    def sources(self) -> list[TextSource]:
        """Where text to fit to comes from: each gives as many windows."""
        if self.dataset and not self.train_file:
            return [TextSource((), self.dataset, self.subset, self.split, self.revision, self.column)]
        if self.dataset or not self.train_file:
            raise ValueError("Give either text files (train_file) or the name of a data set.")
        return [TextSource((file,), column=self.column) for file in self.train_file]

    @classmethod
    def from_values(cls, file: str | os.PathLike[str] | None, given: dict[str, Any]) -> FitRecipe:
        """A YAML file's values, and over them those given otherwise (flags).

        Raises:
            ValueError: the file is not a mapping of known names, or model or output_dir is missing.
        """
        return cls(**recipe_values(cls, file, given))
