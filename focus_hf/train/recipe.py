"""Everything a training run is told: one field for each flag of ``focus-hf train`` and each key of its YAML file."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..recipe_values import check_integer, recipe_values
from ..texts import TextSource

if TYPE_CHECKING:
    from ..adapter import FocusConfig

#: What is trained: the centroids of a frozen model, or everything.
WEIGHTS = ("frozen", "trained")


def _option(help: str, default: Any = dataclasses.MISSING) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class TrainRecipe:
    """A training run: fields are the flags of ``focus-hf train``, which shows what each is for with ``--help``.

    Example:

    ```py
    >>> recipe = TrainRecipe(model="org/base", train_file=["notes.txt"], output_dir="my-adapter", max_steps=300)
    ```

    Raises:
        ValueError: a value is out of range, or a name is unknown.
    """

    model: str = _option("Causal language model: a folder or a Hub id. From scratch, only its configuration is read.")
    output_dir: str = _option("Becomes the adapter's folder; checkpoints go to 'trainer' inside it.")
    tokenizer: str | None = _option("Tokenizer; the model's own by default.", None)
    train_file: list[str] = field(
        default_factory=list,
        metadata={"help": "Text file (one document) or .jsonl file (one a line); may be repeated."},
    )
    dataset: str | None = _option("A data set instead of files: a name on the Hub, or a folder.", None)
    subset: str | None = _option("Configuration of the data set.", None)
    split: str = _option("Split of the data set, such as train[:1%].", "train")
    revision: str | None = _option("Revision of the data set.", None)
    column: str = _option("Column (or key of .jsonl lines) that holds the text.", "text")
    eval_file: list[str] = field(
        default_factory=list,
        metadata={"help": "Held-out text files; by default the tail of the training text is held out."},
    )
    eval_share: float = _option("Share of the training text that is held out without an eval file.", 0.05)
    base_model: str | None = _option("Hub id of the base model for the card, if the model is a folder.", None)
    num_groups: int = _option("Groups per layer (K).", 8)
    top_k: int = _option("Groups per token at inference (k).", 1)
    local_window: int = _option("Distance up to which all pairs are attended (w).", 128)
    sink_tokens: int = _option("First tokens that belong to every group.", 4)
    dense_below: int = _option("Positions below it attend to everything before them.", 0)
    group_dim: int = _option("Dimension of the centroids (d_g).", 16)
    temperature: float = _option("Temperature of the scores (tau).", 0.1)
    sinkhorn_iterations: int = _option("Rounds of Sinkhorn.", 10)
    gate: str = _option("Distant pairs in training: hard (as in inference), additive, multiplicative (paper).", "hard")
    sharpness: float = _option("With the hard gate: spread of the scores that gradients go through.", 2.0)
    gate_start: float = _option("Strength of a soft gate (lambda) at the first step.", 1.0)
    gate_end: float = _option("Strength of a soft gate when it is annealed.", 8.0)
    annealed_at: float = _option("Share of the steps after which a soft gate has its last strength.", 0.7)
    straight_through: bool = _option("With a soft gate: hard memberships forward, soft gradients.", False)
    seq_len: int = _option("Tokens per window.", 1024)
    stride: int | None = _option("Tokens from one window's start to the next; seq_len by default.", None)
    max_steps: int = _option("Optimizer steps.", 300)
    batch_size: int = _option("Windows per device and step.", 4)
    gradient_accumulation_steps: int = _option("Batches per optimizer step.", 1)
    learning_rate: float = _option("Of the centroids (AdamW, warm-up, cosine decay).", 1e-2)
    distill: float = _option("Share (0 to 1) of the distance to dense attention's predictions in the loss.", 0.0)
    warmup_share: float = _option("Share of the steps that warm up.", 0.05)
    weights: str = _option("'trained' lets the base model's weights learn too.", "frozen")
    from_scratch: bool = _option("Start from random weights.", False)
    centroid_steps: int = _option("With trained weights: first steps in which only centroids learn.", 0)
    base_learning_rate: float = _option("Of the base model's weights.", 1e-4)
    seed: int = _option("Of everything random.", 0)
    bf16: bool = _option("Mixed precision.", False)
    gradient_checkpointing: bool = _option("Compute activations again instead of keeping them.", False)
    calibration_windows: int = _option("Training windows by which the groups are balanced at the end.", 32)
    eval_windows: int = _option("Held-out windows to measure on, at most.", 32)
    eval_steps: int = _option("Measure every so many steps; 0 for never.", 0)
    save_steps: int = _option("Save a checkpoint every so many steps; 0 for never.", 0)
    logging_steps: int = _option("Log every so many steps.", 10)
    early_stopping: int = _option("Stop after so many measurements without improvement; 0 for never.", 0)
    report_to: str = _option("Where the Trainer reports to: tensorboard, wandb, ...", "none")
    resume: bool = _option("Continue from the last whole checkpoint.", False)
    overwrite: bool = _option("Replace an adapter that is in output_dir.", False)
    device_map: str | None = _option("How accelerate spreads the base model: auto, balanced, ... or a device.", None)
    dtype: str = _option("Of the base model's weights: auto (its own), float32, bfloat16, float16.", "auto")
    trainer: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "Further arguments of transformers.TrainingArguments, as name=value."}
    )

    def __post_init__(self) -> None:
        for name in ("train_file", "eval_file"):
            value = getattr(self, name)
            setattr(self, name, [value] if isinstance(value, str | os.PathLike) else list(value))
        self.validate()

    def validate(self) -> None:
        """Raise `ValueError` for the first value that is out of range."""
        for name in ("seq_len", "max_steps", "batch_size", "gradient_accumulation_steps", "calibration_windows"):
            check_integer(name, getattr(self, name), 1)
        for name in ("eval_steps", "save_steps", "logging_steps", "early_stopping", "centroid_steps"):
            check_integer(name, getattr(self, name), 0)
        for name in ("learning_rate", "base_learning_rate", "gate_start", "gate_end"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{name} must be a positive number, got {value!r}.")
        if not isinstance(self.distill, int | float) or not 0 <= self.distill <= 1:
            raise ValueError(f"distill is a share of the loss, from 0 to 1; got {self.distill!r}.")
        if self.distill and self.weights == "trained":
            raise ValueError("distill keeps to what a frozen model predicts: it needs weights='frozen'.")
        for name in ("eval_share", "warmup_share"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)!r}.")
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, got {self.weights!r}.")
        if self.from_scratch and self.weights != "trained":
            raise ValueError("from_scratch starts from random weights, so they must learn: weights must be 'trained'.")
        if self.weights == "trained" and self.dtype not in ("auto", "float32"):
            raise ValueError(f"dtype {self.dtype} is too coarse for weights that learn: use bf16 for mixed precision.")
        if self.from_scratch and self.device_map is not None:
            raise ValueError("device_map spreads weights that are loaded; from_scratch loads none.")
        if self.early_stopping and not self.eval_steps:
            raise ValueError("early_stopping counts evaluations: give eval_steps too.")
        self.focus_config()

    def focus_config(self) -> FocusConfig:
        """The adapter's configuration."""
        from ..adapter import FocusConfig  # registers with PEFT, which takes seconds to import

        names = {f.name for f in dataclasses.fields(FocusConfig)} & {f.name for f in dataclasses.fields(self)}
        values = {name: getattr(self, name) for name in names - {"revision"}}
        return FocusConfig(gate_strength=self.gate_end, task_type="CAUSAL_LM", **values)

    def training_source(self) -> TextSource:
        return TextSource(tuple(self.train_file), self.dataset, self.subset, self.split, self.revision, self.column)

    @classmethod
    def from_values(cls, file: str | os.PathLike[str] | None, given: dict[str, Any]) -> TrainRecipe:
        """A YAML file's values, and over them those given otherwise (flags).

        Another text than the file's replaces everything that the file says about where its text is.

        Raises:
            ValueError: the file is not a mapping of known names, or model or output_dir is missing.
        """
        hint = "Arguments of transformers' TrainingArguments go under 'trainer'."
        return cls(**recipe_values(cls, file, given, hint))
