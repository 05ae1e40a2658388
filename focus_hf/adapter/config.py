"""What a Focus adapter is: the fields of ``adapter_config.json``."""

from __future__ import annotations

from dataclasses import dataclass, field

from peft.config import PeftConfig
from peft.utils import PeftType

from ..attention import GATES, HARD_GATE

#: The adapter type; `registration.add_peft_type` has added it to PEFT's enum.
PEFT_TYPE = PeftType("FOCUS")

#: What ``gate`` may be.
ALL_GATES = (*GATES, HARD_GATE)

#: Version of the adapter file format that this package writes; it reads this one and older ones.
FORMAT_VERSION = 1


@dataclass
class FocusConfig(PeftConfig):
    """Configuration of a Focus adapter (arXiv 2604.03260).

    Example:

    ```py
    >>> from peft import get_peft_model
    >>> model = get_peft_model(base, FocusConfig(num_groups=8, top_k=1, task_type="CAUSAL_LM"))
    ```

    Args:
        num_groups (`int`): ``K``, groups per layer.
        top_k (`int`): Groups a token belongs to at inference. More is closer to dense and slower; can be changed
            at any time with `focus_hf.set_routing`.
        local_window (`int`): ``w``. A token always attends to the ``w`` tokens before it and to itself. Contexts of
            at most ``w + 1`` tokens run the base model's own attention.
        sink_tokens (`int`): First tokens of a sequence that every later token may attend to (0 is the paper).
        dense_below (`int`): Tokens at positions below it attend to everything before them, and contexts of at most
            this many tokens run the base model's own attention.
        group_dim (`int`): ``d_g``, dimension in which tokens are compared with centroids.
        temperature (`float`): ``tau``, divides the scores.
        sinkhorn_iterations (`int`): Rounds of Sinkhorn in training; 5 and fewer collapse in the paper.
        gate (`str`): Gate on distant pairs in training: ``"additive"``, or ``"multiplicative"`` (the paper's). With
            ``"hard"``, training runs hard attention at its sparse cost, and only attended pairs teach the centroids.
        gate_strength (`float`): ``lambda``, how strongly the gate acts when training starts from this config. A
            training schedule may change it while it runs.
        straight_through (`bool`): Train with hard memberships in the forward pass and soft gradients instead of soft
            assignments (the paper's way, and the better one in short trainings).
        target_modules (`list[str]` or `str`, *optional*): Attention modules to route, as names, suffixes or a
            regular expression. By default every causal self-attention module is found by itself.
        exclude_modules (`list[str]` or `str`, *optional*): Attention modules to leave alone.
        include_sliding_layers (`bool`): Also route layers whose attention is local by design (sliding window). Their
            sinks act only while they are inside that window.
        hidden_size (`int`, *optional*): Width of the base model. Filled in when the adapter is added to a model and
            checked when it is loaded onto another.
        layers (`list[int]`, *optional*): Indices of the routed layers, filled in and checked likewise.
        format_version (`int`): Version of this file's format.

    Raises:
        ValueError: a value is out of range, or the file was written by a newer format.
    """

    num_groups: int = field(default=8, metadata={"help": "Groups per layer (K)."})
    top_k: int = field(default=1, metadata={"help": "Groups per token at inference (k)."})
    local_window: int = field(default=128, metadata={"help": "Distance up to which all pairs are attended (w)."})
    sink_tokens: int = field(default=4, metadata={"help": "First tokens that belong to every group."})
    dense_below: int = field(default=0, metadata={"help": "Positions below it attend to everything before them."})
    group_dim: int = field(default=16, metadata={"help": "Dimension of the centroids (d_g)."})
    temperature: float = field(default=0.1, metadata={"help": "Temperature of the scores (tau)."})
    sinkhorn_iterations: int = field(default=10, metadata={"help": "Rounds of Sinkhorn in training."})
    gate: str = field(default="additive", metadata={"help": f"Gate in training: {', '.join(ALL_GATES)}."})
    gate_strength: float = field(default=8.0, metadata={"help": "Strength of the gate in training (lambda)."})
    straight_through: bool = field(default=False, metadata={"help": "Hard memberships forward, soft gradients."})
    target_modules: list[str] | str | None = field(default=None, metadata={"help": "Attention modules to route."})
    exclude_modules: list[str] | str | None = field(default=None, metadata={"help": "Attention modules to skip."})
    include_sliding_layers: bool = field(default=False, metadata={"help": "Also route sliding-window layers."})
    hidden_size: int | None = field(default=None, metadata={"help": "Width of the base model (filled in)."})
    layers: list[int] | None = field(default=None, metadata={"help": "Routed layers (filled in)."})
    format_version: int = field(default=FORMAT_VERSION, metadata={"help": "Version of this file's format."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PEFT_TYPE
        self.validate()

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
        if not self.temperature > 0:
            raise ValueError(f"FocusConfig.temperature must be positive, got {self.temperature!r}.")
        if not self.gate_strength >= 0:
            raise ValueError(f"FocusConfig.gate_strength must not be negative, got {self.gate_strength!r}.")
        if self.gate not in ALL_GATES:
            raise ValueError(f"FocusConfig.gate must be one of {', '.join(ALL_GATES)}, got {self.gate!r}.")


_MINIMUM = {
    "num_groups": 1,
    "top_k": 1,
    "local_window": 0,
    "sink_tokens": 0,
    "dense_below": 0,
    "group_dim": 1,
    "sinkhorn_iterations": 1,
}
