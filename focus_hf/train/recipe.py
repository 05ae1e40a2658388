"""Everything a training run is told: one field for each flag of ``focus-hf train`` and each key of its YAML file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ..recipe import Recipe, option

if TYPE_CHECKING:
    from ..adapter import FocusConfig

#: What is trained: the centroids of a frozen model, or everything.
WEIGHTS = ("frozen", "trained")


@dataclass
class TrainRecipe(Recipe):
    """A training run: fields are the flags of ``focus-hf train``, which shows what each is for with ``--help``.

    Example:

    ```py
    >>> recipe = TrainRecipe(model="org/base", train_file=["notes.txt"], output_dir="my-adapter", max_steps=300)
    ```

    Raises:
        ValueError: a value is out of range, or a name is unknown.
    """

    model: str = option("Causal language model: a folder or a Hub id. From scratch, only its configuration is read.")
    output_dir: str = option("Becomes the adapter's folder; checkpoints go to 'trainer' inside it.")
    eval_file: list[str] = option("Held-out text files; by default the tail of the training text is held out.", list)
    eval_share: float = option("Share of the training text that is held out without an eval file.", 0.05)
    num_groups: int = option("Groups per layer (K).", 8)
    top_k: int = option("Groups per token at inference (k).", 1)
    local_window: int = option("Distance up to which all pairs are attended (w).", 128)
    sink_tokens: int = option("First tokens that belong to every group.", 4)
    dense_below: int = option("Positions below it attend to everything before them.", 0)
    group_dim: int = option("Dimension of the centroids (d_g).", 16)
    temperature: float = option("Temperature of the scores (tau).", 0.1)
    sinkhorn_iterations: int = option("Rounds of Sinkhorn.", 10)
    gate: str = option("Distant pairs in training: hard (as in inference), additive, multiplicative (paper).", "hard")
    sharpness: float = option("With the hard gate: spread of the scores that gradients go through.", 2.0)
    gate_start: float = option("Strength of a soft gate (lambda) at the first step.", 1.0)
    gate_end: float = option("Strength of a soft gate when it is annealed.", 8.0)
    annealed_at: float = option("Share of the steps after which a soft gate has its last strength.", 0.7)
    straight_through: bool = option("With a soft gate: hard memberships forward, soft gradients.", False)
    seq_len: int = option("Tokens per window.", 1024, at_least=1)
    stride: int | None = option("Tokens from one window's start to the next; seq_len by default.", None)
    max_steps: int = option("Optimizer steps.", 300, at_least=1)
    batch_size: int = option("Windows per device and step.", 4, at_least=1)
    gradient_accumulation_steps: int = option("Batches per optimizer step.", 1, at_least=1)
    learning_rate: float = option("Of the centroids (AdamW, warm-up, cosine decay).", 1e-2)
    distill: float = option("Share (0 to 1) of the distance to dense attention's predictions in the loss.", 0.0)
    warmup_share: float = option("Share of the steps that warm up.", 0.05)
    weights: str = option("'trained' lets the base model's weights learn too.", "frozen")
    from_scratch: bool = option("Start from random weights.", False)
    centroid_steps: int = option("With trained weights: first steps in which only centroids learn.", 0, at_least=0)
    base_learning_rate: float = option("Of the base model's weights.", 1e-4)
    bf16: bool = option("Mixed precision.", False)
    calibration_windows: int = option("Training windows by which the groups are balanced at the end.", 32, at_least=1)
    eval_windows: int = option("Held-out windows to measure on, at most.", 32)
    eval_steps: int = option("Measure every so many steps; 0 for never.", 0, at_least=0)
    save_steps: int = option("Save a checkpoint every so many steps; 0 for never.", 0, at_least=0)
    logging_steps: int = option("Log every so many steps.", 10, at_least=0)
    early_stopping: int = option("Stop after so many measurements without improvement; 0 for never.", 0, at_least=0)
    report_to: str = option("Where the Trainer reports to: tensorboard, wandb, ...", "none")
    resume: bool = option("Continue from the last whole checkpoint.", False)
    trainer: dict[str, Any] = option("Further arguments of transformers.TrainingArguments, as name=value.", dict)

    hint: ClassVar[str] = "Arguments of transformers' TrainingArguments go under 'trainer'."

    def __post_init__(self) -> None:
        for name in ("learning_rate", "base_learning_rate", "gate_start", "gate_end"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{name} must be a positive number, got {value!r}.")
        super().__post_init__()
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
        # Centroids learn from nothing but pairs of tokens that groups decide about.
        shortest = max(self.local_window + self.sink_tokens + 2, self.dense_below + 1)
        if self.weights == "frozen" and self.seq_len < shortest:
            raise ValueError(
                f"seq_len is {self.seq_len}, but centroids learn from pairs of tokens that groups decide about, and "
                f"there are none: local_window is {self.local_window}, sink_tokens is {self.sink_tokens} and "
                f"dense_below is {self.dense_below}. Use a seq_len of at least {shortest}, better several times that, "
                "or smaller values of these."
            )

    def focus_config(self, **values: Any) -> FocusConfig:
        """The adapter's configuration: what the recipe says, and over it ``values``."""
        return super().focus_config(**{"gate_strength": self.gate_end, **values})
