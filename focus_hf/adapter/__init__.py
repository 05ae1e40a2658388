"""The adapter as PEFT and transformers see it."""

from .registration import add_peft_type, register

add_peft_type()  # FocusConfig names the type

from ..settings import FORMAT_VERSION  # noqa: E402
from .config import FocusConfig  # noqa: E402
from .control import routing_mode, set_routing  # noqa: E402
from .dial import share_at, threshold_for  # noqa: E402
from .layer import FocusLayer, focus_layers  # noqa: E402
from .model import FocusModel  # noqa: E402
from .observe import (  # noqa: E402
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

register()

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
