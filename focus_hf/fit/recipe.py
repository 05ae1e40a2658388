"""Everything a fit is told: one field for each flag of ``focus-hf fit`` and each key of its YAML file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from ..recipe import Recipe, option
from ..texts import TextSource

if TYPE_CHECKING:
    from ..adapter import FocusConfig

#: Windows by default: tokens of the shorter and the longer ones, how many shorter ones, and for how many one longer.
#: Without long windows a context of their length loses several times as much (studies/NOTES.md).
LENGTHS, WINDOWS, OTHERS = (2048, 8192), 24, 5


@dataclass
class FitRecipe(Recipe):
    """A fit: fields are the flags of ``focus-hf fit``, which shows what each is for with ``--help``.

    Example:

    ```py
    >>> recipe = FitRecipe(model="org/base", train_file=["novel.txt", "code.txt"], output_dir="adapter")
    ```

    Raises:
        ValueError: a value is out of range.
    """

    output_dir: str = option("Becomes the adapter's folder; fitted layers are kept in 'fit' inside it.")
    train_file: list[str] = option(
        "Text file or .jsonl file; may be repeated, each gives as many windows. Many kinds are better than much.", list
    )
    num_groups: int = option("Groups per key/value head (K).", 72)
    group_dim: int = option("Dimension of the centroids (d_g).", 12)
    local_window: int = option("Distance up to which all pairs are attended (w).", 32)
    sink_tokens: int = option("First tokens that every token may attend to.", 4)
    num_bands: int = option("Bands of distance beyond the window, which double; the last one is open.", 7)
    each_query_head: bool = option(
        "Query heads choose what they read each for itself, those of a key/value head together otherwise.", True
    )
    dense_below: int = option("Positions below it attend to everything before them; shorter prompts are dense.", 0)
    seq_len: list[int] = option(
        "Tokens per window; may be repeated. The longest should be the length to be served. [default: 2048 and 8192, "
        "as far as the model has positions]",
        list,
        at_least=1,
    )
    windows: list[int] = option(
        "Windows to fit to, of each length. [default: 24 of the first, a fifth as many of the others]",
        list,
        at_least=1,
    )
    dial_windows: list[int] = option(
        "Further windows of each length, on which the dial is measured. [default: a third as many]", list, at_least=1
    )
    gradient_checkpointing: bool = option(
        "Compute activations again instead of keeping them: a tenth slower, for a part of the memory.",
        True,
    )
    lookups: int = option(
        "Of the windows to fit to, one in so many is of made-up names, told and said again; 0: none.", 8, at_least=0
    )
    rows: int = option("Queries of a window that are looked at, spread over it.", 1024, at_least=1)
    steps: int = option(
        "Steps in which a layer's queries learn which cells to read: half by importance, half by cost.",
        600,
        at_least=2,
    )
    pairs: float = option("Share of pairs that the adapter attends to until the dial is turned.", 0.25)
    scratch_dir: str | None = option("Where captured tensors wait; the system's temporary folder by default.", None)
    scratch_gb: float = option("What they may take; what needs more is captured in several passes.", 16.0)
    resume: bool = option("Use the layers that are fitted already.", False)

    def __post_init__(self) -> None:
        if isinstance(self.pairs, bool) or not isinstance(self.pairs, int | float) or not 0 < self.pairs <= 1:
            raise ValueError(f"pairs is a share of all pairs, above 0 and at most 1; got {self.pairs!r}.")
        super().__post_init__()
        for name in ("windows", "dial_windows"):
            if len(counts := getattr(self, name)) > 1 and len(counts) != len(self.seq_len):
                raise ValueError(
                    f"seq_len names {len(self.seq_len)} lengths and {name} {len(counts)} numbers of windows: give a "
                    "number for each length, or one for the first."
                )
        shortest = 2 * (self.local_window + self.sink_tokens)
        if self.seq_len and min(self.seq_len) < shortest:
            raise ValueError(
                f"A length of {min(self.seq_len)} leaves next to nothing beyond local_window ({self.local_window}) "
                f"and sink_tokens ({self.sink_tokens}). Use at least {shortest}."
            )
        if not isinstance(self.scratch_gb, int | float) or not self.scratch_gb > 0:
            raise ValueError(f"scratch_gb must be a positive number, got {self.scratch_gb!r}.")

    def for_model(self, positions: int | None) -> Self:
        """With what it does not say about lengths and numbers of windows.

        Args:
            positions: how many tokens the model can read, where its configuration says so.
        """
        longest = min(positions or LENGTHS[-1], LENGTHS[-1])
        lengths = self.seq_len or sorted({min(length, longest) for length in LENGTHS})

        def of_each(given: list[int], default: list[int]) -> list[int]:
            first, *others = given or default
            return [first, *(others or [max(1, round(first / OTHERS))] * (len(lengths) - 1))]

        windows = of_each(self.windows, [WINDOWS])
        dial_windows = of_each(self.dial_windows, [max(1, count // 3) for count in windows])
        return replace(self, seq_len=lengths, windows=windows, dial_windows=dial_windows)

    @property
    def lengths(self) -> list[int]:
        """Of all windows: those to fit to, then those to measure the dial on; `for_model` says them."""
        counts = (*self.windows, *self.dial_windows)
        return [length for length, count in zip(2 * self.seq_len, counts, strict=True) for _ in range(count)]

    @property
    def lookup_windows(self) -> list[int]:
        """Numbers of the windows of made-up lookups: one in the middle of every ``lookups`` that are fitted to."""
        return list(range((self.lookups - 1) // 2, sum(self.windows), self.lookups)) if self.lookups else []

    def focus_config(self, **values: Any) -> FocusConfig:
        """The adapter's configuration: what the recipe says, and over it ``values``."""
        return super().focus_config(routing="cells", **values)

    def sources(self) -> list[TextSource]:
        """Where text to fit to comes from: each gives as many windows."""
        if self.train_file and not self.dataset:
            return [TextSource((file,), column=self.column) for file in self.train_file]
        return [self.training_source()]
