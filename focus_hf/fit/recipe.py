"""Everything a fit is told: one field for each flag of ``focus-hf fit`` and each key of its YAML file."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from typing import Any

from ..adapter import FocusConfig
from ..texts import TextSource
from ..train.values import check_integer, recipe_values
from .costs import Option

#: Windows that heads may have without groups, and with them, and how many groups a query may read.
_WINDOWS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_WINDOWS_BESIDE_GROUPS = (16, 32, 64, 128, 256)
_TOP_KS = (1, 2, 3, 4, 6, 8, 12, 16)


def _option(help: str, default: Any = dataclasses.MISSING) -> Any:
    return field(default=default, metadata={"help": help})


def _several(help: str) -> Any:
    return field(default_factory=list, metadata={"help": help})


@dataclass
class FitRecipe:
    """A fit: fields are the flags of ``focus-hf fit``, which shows what each is for with ``--help``.

    Example:

    ```py
    >>> recipe = FitRecipe(model="org/base", train_file=["novel.txt", "code.txt"], output_dir="adapter", pairs=[0.25])
    ```

    Raises:
        ValueError: a value is out of range.
    """

    model: str = _option("Causal language model: a folder or a Hub id.")
    output_dir: str = _option("Becomes the adapter's folder; fitted layers are kept in 'fit' inside it.")
    tokenizer: str | None = _option("Tokenizer; the model's own by default.", None)
    train_file: list[str] = _several("Text file or .jsonl file; may be repeated, each gives as many windows.")
    dataset: str | None = _option("A data set instead of files: a name on the Hub, or a folder.", None)
    subset: str | None = _option("Configuration of the data set.", None)
    split: str = _option("Split of the data set, such as train[:1%].", "train")
    revision: str | None = _option("Revision of the data set.", None)
    column: str = _option("Column (or key of .jsonl lines) that holds the text.", "text")
    base_model: str | None = _option("Hub id of the base model for the card, if the model is a folder.", None)
    pairs: list[float] = _several("Share of the pairs that may be attended; may be repeated. [default: 0.25]")
    at: list[int] = _several("Length at which a budget holds, one or one for each; seq_len by default.")
    headroom: float = _option("Share of a budget that is not planned with, for text with less even groups.", 0.0)
    recall: list[float] = _several(
        "Share of tokens taken to recall what stands far back, such as 0.1: heads that find it get more pairs. "
        "One, or one for each budget. [default: 0]"
    )
    groups: bool = _option(
        "Groups of each head's own; without them heads have windows, or attend to everything.", True
    )
    uniform: bool = _option("All heads attend alike, for comparison.", False)
    num_groups: int = _option("Groups per head (K).", 64)
    group_dim: int = _option("Dimension of the centroids (d_g).", 16)
    local_window: int = _option("Distance beyond which queries are taught which groups to read.", 64)
    sink_tokens: int = _option("First tokens that every token may attend to.", 4)
    dense_below: int = _option("Positions below it attend to everything before them; shorter prompts are dense.", 0)
    seq_len: int = _option("Tokens per window.", 2048)
    windows: int = _option("Windows of text to fit groups to.", 12)
    cost_windows: int = _option("Further windows, on which the costs of every head are measured, at each length.", 4)
    rows: int = _option("Queries of a window that are looked at, spread over it.", 1024)
    steps: int = _option("Steps in which a layer's queries learn which groups to read.", 300)
    seed: int = _option("Of everything random.", 0)
    half: bool = _option("Save numbers of 16 bits instead of 32: half the file.", False)
    gradient_checkpointing: bool = _option("Compute activations again instead of keeping them.", False)
    scratch_dir: str | None = _option("Where captured tensors wait; the system's temporary folder by default.", None)
    scratch_gb: float = _option("What they may take; what needs more is captured in several passes.", 16.0)
    device_map: str | None = _option("How accelerate spreads the base model: auto, balanced, ... or a device.", None)
    dtype: str = _option("Of the base model's weights: auto (its own), float32, bfloat16, float16.", "auto")
    resume: bool = _option("Use the layers that are fitted already, with other budgets too.", False)
    overwrite: bool = _option("Replace an adapter that is in output_dir.", False)

    def __post_init__(self) -> None:
        for name in ("train_file", "pairs", "at", "recall"):
            value = getattr(self, name)
            setattr(self, name, list(value) if isinstance(value, list | tuple) else [value])
        self.pairs = self.pairs or [0.25]
        self.at = self.at or [self.seq_len]
        if len(self.at) == 1:
            self.at = self.at * len(self.pairs)
        self.recall = self.recall or [0.0]
        if len(self.recall) == 1:
            self.recall = self.recall * len(self.pairs)
        self.validate()

    def validate(self) -> None:
        """Raise `ValueError` for the first value that is out of range."""
        for name in ("seq_len", "windows", "cost_windows", "rows", "steps"):
            check_integer(name, getattr(self, name), 1)
        for share in self.pairs:
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
                raise ValueError(f"pairs is a share of all pairs, above 0 and at most 1; got {share!r}.")
        for share in self.recall:
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
                raise ValueError(f"recall is a share of tokens, from 0 to 1; got {share!r}.")
        if isinstance(self.headroom, bool) or not isinstance(self.headroom, int | float) or not 0 <= self.headroom < 1:
            raise ValueError(f"headroom is a share of a budget, at least 0 and below 1; got {self.headroom!r}.")
        if len({f"{share:.4f}" for share in self.pairs}) < len(self.pairs):
            raise ValueError("pairs names one share twice; budgets are told apart by their share.")
        if len(self.at) != len(self.pairs):
            raise ValueError(
                f"at gives {len(self.at)} lengths for {len(self.pairs)} budgets: give one, or one for each."
            )
        if len(self.recall) != len(self.pairs):
            raise ValueError(
                f"recall gives {len(self.recall)} shares for {len(self.pairs)} budgets: give one, or one for each."
            )
        for length in (*self.at, self.seq_len):
            check_integer("at", length, 2)
            if length < (shortest := 2 * (self.local_window + self.sink_tokens)):
                raise ValueError(
                    f"A length of {length} leaves next to nothing beyond local_window ({self.local_window}) and "
                    f"sink_tokens ({self.sink_tokens}). Use at least {shortest}."
                )
        if not isinstance(self.scratch_gb, int | float) or not self.scratch_gb > 0:
            raise ValueError(f"scratch_gb must be a positive number, got {self.scratch_gb!r}.")
        self.focus_config()

    @property
    def lengths(self) -> list[int]:
        """Lengths at which costs are measured."""
        return sorted(set(self.at))

    @property
    def recall_lengths(self) -> list[int]:
        """Those at which it is measured, too, what the options do to recall."""
        return sorted({length for length, share in zip(self.at, self.recall, strict=True) if share})

    def options(self, length: int) -> list[Option]:
        """The ways for a head to attend at a length that are measured, besides everything."""
        options = [Option(window) for window in _WINDOWS if window < length - 1]
        if self.groups:
            top_ks = [top_k for top_k in _TOP_KS if 2 * top_k <= self.num_groups]
            options += [Option(w, k) for w in _WINDOWS_BESIDE_GROUPS if w < length // 2 for k in top_ks]
        return options

    def focus_config(self, **values: Any) -> FocusConfig:
        """The adapter's configuration."""
        names = ("num_groups", "group_dim", "local_window", "sink_tokens", "dense_below")
        values = {name: getattr(self, name) for name in names} | values
        return FocusConfig(routing="per_head", temperature=1.0, task_type="CAUSAL_LM", **values)

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
