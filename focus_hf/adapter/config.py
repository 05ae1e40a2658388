"""What a Focus adapter is: the fields of ``adapter_config.json``."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from peft.config import PeftConfig
from peft.utils import WEIGHTS_NAME, PeftType

from ..attention import Pattern
from ..records.adapter_files import CONFIG_FILE, WEIGHTS_FILE, check_adapter, refuse_pickles
from ..settings import FocusSettings


def _peft_type(name: str) -> PeftType:
    """A member of PEFT's enum of adapter types, added to it if it is new: there is no plug-in mechanism."""
    if name not in PeftType.__members__:
        member = str.__new__(PeftType, name)
        member._name_ = member._value_ = name
        setattr(PeftType, name, member)  # before it is a member: members cannot be assigned
        PeftType._member_names_.append(name)
        PeftType._member_map_[name] = member
        PeftType._value2member_map_[name] = member
    return PeftType(name)


#: The adapter type.
PEFT_TYPE = _peft_type("FOCUS")


@dataclass
class FocusConfig(PeftConfig, FocusSettings):
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
        temperature (`float`): ``tau``, divides the scores. Memberships do not depend on it.
        sinkhorn_iterations (`int`): Rounds of Sinkhorn in training; 5 and fewer collapse in the paper.
        gate (`str`): What training does with distant pairs of different groups. With ``"hard"`` they are not attended,
            as in inference, and gradients say what attending to them would change. ``"additive"`` and
            ``"multiplicative"`` (the paper's) are soft: such pairs become weaker.
        sharpness (`float`): With the hard gate: spread of the median token's scores in the softmax that gradients go
            through. Smaller lets more tokens be undecided between groups.
        gate_strength (`float`): ``lambda``, how strongly a soft gate acts when training starts from this config. A
            training schedule may change it while it runs.
        straight_through (`bool`): With a soft gate: hard memberships in the forward pass and soft gradients instead
            of soft assignments (the paper's way).
        target_modules (`list[str]` or `str`, *optional*): Attention modules to route, as names, suffixes or a
            regular expression. By default every causal self-attention module is found by itself.
        exclude_modules (`list[str]` or `str`, *optional*): Attention modules to leave alone.
        include_sliding_layers (`bool`): Also route layers whose attention is local by design (sliding window). Their
            sinks act only while they are inside that window.
        routing (`str`): ``"shared"``, one routing for all heads of a layer (the paper's), or ``"cells"``: each
            key/value head groups its keys by content, and a query reads groups at distances. Such adapters are fitted
            (`focus-hf fit`), not trained by gradient.
        num_bands (`int`): With cells: bands of distance beyond the window, which double; the last one is open.
        each_query_head (`bool`): With cells: every query head chooses what it reads for itself. Otherwise those of a
            key/value head choose together, so that as many keys are loaded as pairs are computed.
        threshold (`float`): With cells: the dial. A query reads the cells whose share of its attention, for each
            position of their band, has a logarithm above it; lower reads more.
        pairs (`float`, *optional*): With cells: the share of pairs to attend to, in the place of a threshold; changed
            with ``focus_hf.set_routing(model, pairs=...)``.
        pairs_curves (`dict[str, list]`, *optional*): With cells: by position, points ``[threshold, share of pairs]``
            that were measured when the adapter was fitted.
        key_value_heads, query_heads, head_dim (`int`, *optional*): With cells: the heads of a layer, filled in.
        hidden_size (`int`, *optional*): Width of the base model. Filled in when the adapter is added to a model and
            checked when it is loaded onto another.
        layers (`list[int]`, *optional*): Indices of the routed layers, filled in and checked likewise.
        revision (`str`, *optional*): Commit of the base model that the centroids were trained on. A base model that
            cannot be that one gives a warning when the adapter is loaded.
        tokenizer_revision (`str`, *optional*): Commit of the tokenizer they were trained with.
        format_version (`int`): Version of this file's format.

    Raises:
        ValueError: a value is out of range, or the file was written by a newer format.
    """

    target_modules: list[str] | str | None = field(default=None, metadata={"help": "Attention modules to route."})
    exclude_modules: list[str] | str | None = field(default=None, metadata={"help": "Attention modules to skip."})
    include_sliding_layers: bool = field(default=False, metadata={"help": "Also route sliding-window layers."})

    def __post_init__(self) -> None:
        where = "FocusConfig" if self.peft_type is None else CONFIG_FILE  # PEFT names the type when it reads a file
        self.validate(where)
        try:
            super().__post_init__()
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        self.peft_type = PEFT_TYPE

    @property
    def pattern(self) -> Pattern:
        """Window, sinks, dense start and bands, as attention takes them."""
        bands = self.num_bands if self.by_cells else 1
        return Pattern(self.local_window, self.sink_tokens, self.dense_below, bands)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str, subfolder: str | None = None, **kwargs: Any
    ) -> FocusConfig:
        """Read the configuration in a folder or on the Hub; with weights beside it, check the whole adapter.

        PEFT calls this before it loads the weights: here their file still has a name, and nothing has been added to
        the model.

        Raises:
            ValueError: the configuration is out of range, the weights are not what it says, or a pickle.
        """
        hub_arguments, _, _ = cls._split_kwargs(kwargs)
        weights = _find_weights(pretrained_model_name_or_path, subfolder, hub_arguments)
        try:
            config = super().from_pretrained(pretrained_model_name_or_path, subfolder=subfolder, **kwargs)
        except ValueError as error:
            if not str(error).startswith(CONFIG_FILE):
                raise
            raise ValueError(f"{Path(pretrained_model_name_or_path, subfolder or '')}/{error}") from None
        if weights is not None:
            check_adapter(weights.parent)
        return config


def _find_weights(name: str, subfolder: str | None, hub_arguments: dict[str, Any]) -> Path | None:
    """The adapter's safetensors file, or ``None`` if there is none; one that has only a pickle is refused."""
    if os.path.isdir(name):
        folder = Path(name, subfolder or "")
        if (folder / WEIGHTS_FILE).is_file():
            return folder / WEIGHTS_FILE
        refuse_pickles([WEIGHTS_NAME] if (folder / WEIGHTS_NAME).is_file() else [], str(folder))
        return None
    try:
        return Path(hf_hub_download(name, WEIGHTS_FILE, subfolder=subfolder, **hub_arguments))
    except EntryNotFoundError:
        with suppress(EntryNotFoundError):
            hf_hub_download(name, WEIGHTS_NAME, subfolder=subfolder, dry_run=True, **hub_arguments)
            refuse_pickles([WEIGHTS_NAME], name)
        return None
