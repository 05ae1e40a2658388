"""The adapter as PEFT and transformers see it."""

from .registration import add_peft_type, register

add_peft_type()  # FocusConfig names the type

from .config import FORMAT_VERSION, FocusConfig  # noqa: E402
from .control import (  # noqa: E402
    PairCount,
    observe_attention,
    observe_pairs,
    observe_routing,
    routing_by,
    routing_mode,
    set_routing,
)
from .find_layers import focus_layers  # noqa: E402
from .heads import HeadView  # noqa: E402
from .host_cache import FocusCache, HostTier  # noqa: E402
from .layer import FocusLayer  # noqa: E402
from .model import FocusModel  # noqa: E402
from .router import Router, final_scores, groups_read  # noqa: E402

register()

__all__ = [
    "FORMAT_VERSION",
    "FocusCache",
    "FocusConfig",
    "FocusLayer",
    "FocusModel",
    "HeadView",
    "HostTier",
    "PairCount",
    "Router",
    "final_scores",
    "focus_layers",
    "groups_read",
    "observe_attention",
    "observe_pairs",
    "observe_routing",
    "routing_by",
    "routing_mode",
    "set_routing",
]
