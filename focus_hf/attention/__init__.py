"""Focus attention in pure torch: its definition, a plain masked path, the fast grouped path, soft gates."""

from .gated import GATES, gated_attention
from .grouped import grouped_focus_attention
from .mask import PADDING, Pattern, attended_pairs, count_pairs, share_a_group
from .masked import masked_attention, masked_focus_attention
from .merge import Accumulator, merge

__all__ = [
    "GATES",
    "PADDING",
    "Accumulator",
    "Pattern",
    "attended_pairs",
    "count_pairs",
    "gated_attention",
    "grouped_focus_attention",
    "masked_attention",
    "masked_focus_attention",
    "merge",
    "share_a_group",
]
