"""What a Focus adapter is set to: fields, their defaults and their ranges. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

#: Version of the adapter file format that this package writes; it reads this one and older ones.
FORMAT_VERSION = 1

#: What ``gate`` may be: the gates of `focus_hf.attention`, by name.
GATE_NAMES = ("hard", "additive", "multiplicative")


@dataclass
class FocusSettings:
    """The part of ``adapter_config.json`` that is Focus' own, see `focus_hf.FocusConfig` for what each field means."""

    num_groups: int = field(default=8, metadata={"help": "Groups per layer (K)."})
    top_k: int = field(default=1, metadata={"help": "Groups per token at inference (k)."})
    local_window: int = field(default=128, metadata={"help": "Distance up to which all pairs are attended (w)."})
    sink_tokens: int = field(default=4, metadata={"help": "First tokens that belong to every group."})
    dense_below: int = field(default=0, metadata={"help": "Positions below it attend to everything before them."})
    group_dim: int = field(default=16, metadata={"help": "Dimension of the centroids (d_g)."})
    temperature: float = field(default=0.1, metadata={"help": "Temperature of the scores (tau)."})
    sinkhorn_iterations: int = field(default=10, metadata={"help": "Rounds of Sinkhorn in training."})
    gate: str = field(default="hard", metadata={"help": f"Gate in training: {', '.join(GATE_NAMES)}."})
    sharpness: float = field(default=2.0, metadata={"help": "Spread of the scores in training with a hard gate."})
    gate_strength: float = field(default=8.0, metadata={"help": "Strength of a soft gate in training (lambda)."})
    straight_through: bool = field(default=False, metadata={"help": "Hard memberships forward, soft gradients."})
    hidden_size: int | None = field(default=None, metadata={"help": "Width of the base model (filled in)."})
    layers: list[int] | None = field(default=None, metadata={"help": "Routed layers (filled in)."})
    tokenizer_revision: str | None = field(default=None, metadata={"help": "Commit of the tokenizer (filled in)."})
    format_version: int = field(default=FORMAT_VERSION, metadata={"help": "Version of this file's format."})

    @property
    def training_sharpness(self) -> float | None:
        """Spread of the scores in training's softmax; ``None``: what the temperature makes of it."""
        return self.sharpness if self.gate == "hard" else None

    def validate(self) -> None:
        """Raise `ValueError` for the first value that is out of range, naming it and what was expected."""
        if not isinstance(self.format_version, int) or self.format_version > FORMAT_VERSION:
            raise ValueError(
                f"This Focus adapter has format_version {self.format_version!r}; the installed focus_hf reads up to "
                f"{FORMAT_VERSION}. Upgrade it: pip install -U focus-hf"
            )
        for name, minimum in _MINIMUM.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
                raise ValueError(f"FocusConfig.{name} must be an integer of at least {minimum}, got {value!r}.")
        if self.top_k > self.num_groups:
            raise ValueError(
                f"FocusConfig.top_k ({self.top_k}) cannot exceed num_groups ({self.num_groups}): a token belongs to "
                f"at most all groups. Use a top_k from 1 to {self.num_groups}."
            )
        for name in ("temperature", "sharpness", "gate_strength"):
            if not isinstance(getattr(self, name), int | float):
                raise ValueError(f"FocusConfig.{name} must be a number, got {getattr(self, name)!r}.")
        for name in ("temperature", "sharpness"):
            if not getattr(self, name) > 0:
                raise ValueError(f"FocusConfig.{name} must be positive, got {getattr(self, name)!r}.")
        if not self.gate_strength >= 0:
            raise ValueError(f"FocusConfig.gate_strength must not be negative, got {self.gate_strength!r}.")
        if self.gate not in GATE_NAMES:
            raise ValueError(f"FocusConfig.gate must be one of {', '.join(GATE_NAMES)}, got {self.gate!r}.")


_MINIMUM = {
    "num_groups": 1,
    "top_k": 1,
    "local_window": 0,
    "sink_tokens": 0,
    "dense_below": 0,
    "group_dim": 1,
    "sinkhorn_iterations": 1,
}
