"""Focus attention: its definition, exact paths to compute it, soft gates for training. It knows tensors, no models."""

from .definition import PADDING, Pattern, WhoAttends, attended_pairs, by_memberships, of_all_heads, read_by_any
from .kernels import KERNELS, Kernel, find_kernel, kernel_named
from .masked import masked_attention, masked_focus_attention
from .on_device import (
    cell_reads,
    decode_in_place,
    key_groups,
    prompt_tokens,
    prompts_in_place,
    reads_in_place,
    reads_prompts_in_place,
)
from .pairs import count_pairs
from .paths import PATHS, focus_attention
from .problem import Problem, Scores
from .training import GATES, HARD_GATE, credit_memberships, gated_attention

__all__ = [
    "GATES",
    "HARD_GATE",
    "KERNELS",
    "PADDING",
    "PATHS",
    "Kernel",
    "Pattern",
    "Problem",
    "Scores",
    "WhoAttends",
    "attended_pairs",
    "by_memberships",
    "cell_reads",
    "count_pairs",
    "credit_memberships",
    "decode_in_place",
    "find_kernel",
    "focus_attention",
    "gated_attention",
    "kernel_named",
    "key_groups",
    "masked_attention",
    "masked_focus_attention",
    "of_all_heads",
    "prompt_tokens",
    "prompts_in_place",
    "read_by_any",
    "reads_in_place",
    "reads_prompts_in_place",
]
