"""Make PEFT and transformers know Focus. Runs on import; running it again changes nothing."""

from __future__ import annotations

import warnings

from peft.utils import PeftType
from transformers import AttentionInterface, AttentionMaskInterface


def add_peft_type(name: str = "FOCUS") -> None:
    """Add a member to PEFT's enum of adapter types, which has no plug-in mechanism of its own."""
    if name in PeftType.__members__:
        return
    member = str.__new__(PeftType, name)
    member._name_ = member._value_ = name
    setattr(PeftType, name, member)  # before it is a member: members cannot be assigned
    PeftType._member_names_.append(name)
    PeftType._member_map_[name] = member
    PeftType._value2member_map_[name] = member


def register() -> None:
    """Register the adapter type ``FOCUS`` with PEFT, and attention ``"focus"`` with transformers."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING

    from .config import PEFT_TYPE, FocusConfig
    from .interface import focus_attention_forward
    from .masks import focus_mask
    from .model import FocusModel

    known = PEFT_TYPE_TO_CONFIG_MAPPING.get(PEFT_TYPE)
    if known is not None and known.__module__ != FocusConfig.__module__:
        warnings.warn(
            f"PEFT already has an adapter type FOCUS, from {known.__module__}; focus_hf leaves it in place, and Focus "
            "adapters will be read by it. Import only one of the two packages.",
            stacklevel=2,
        )
        return
    PEFT_TYPE_TO_CONFIG_MAPPING[PEFT_TYPE] = FocusConfig
    PEFT_TYPE_TO_TUNER_MAPPING[PEFT_TYPE] = FocusModel
    PEFT_TYPE_TO_PREFIX_MAPPING[PEFT_TYPE] = FocusModel.prefix
    AttentionInterface.register("focus", focus_attention_forward)
    AttentionMaskInterface.register("focus", focus_mask)
