"""The adapter as PEFT and transformers see it, who know it once this is imported."""

import warnings

from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from transformers import AttentionInterface, AttentionMaskInterface

from ..settings import FORMAT_VERSION
from .config import PEFT_TYPE, FocusConfig
from .control import routing_mode, set_routing
from .dial import share_at, threshold_for
from .interface import focus_attention_forward
from .layer import FocusLayer, focus_layers
from .masks import focus_mask
from .model import FocusModel
from .observe import (
    HeadView,
    PairCount,
    Router,
    Seen,
    final_scores,
    groups_read,
    observe_attention,
    observe_pairs,
    observe_routing,
    who_attends,
)

__all__ = [
    "FORMAT_VERSION",
    "FocusConfig",
    "FocusLayer",
    "FocusModel",
    "HeadView",
    "PairCount",
    "Router",
    "Seen",
    "final_scores",
    "focus_layers",
    "groups_read",
    "observe_attention",
    "observe_pairs",
    "observe_routing",
    "routing_mode",
    "set_routing",
    "share_at",
    "threshold_for",
    "who_attends",
]


def register() -> None:
    """Register the adapter type ``FOCUS`` with PEFT, and attention ``"focus"`` with transformers."""
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


register()
