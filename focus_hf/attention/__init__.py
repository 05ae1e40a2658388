"""Focus attention in pure torch: its definition, exact paths to compute it, soft gates for training."""

from .biased import biased_focus_attention
from .constants import count_up, keeps, nothing_read, starts_as_scores, starts_of_rows
from .decode import attend_store, takes
from .device_pages import DevicePages
from .gated import GATES, HARD_GATE, gated_attention
from .gathered import gather_index, gathered_attention
from .group_codes import MAX_GROUPS
from .group_numbers import TokenByNumbers, Windows, memberships_of, numbers_of
from .group_rows import GroupRows, TokenByRows
from .grouped import grouped_focus_attention
from .hard_gate import credit_memberships
from .head_class import (
    EVERYTHING,
    HeadClass,
    HeadClasses,
    HeadRow,
    columns_by_head,
    groups_per_head,
    head_rows,
    memberships_of_columns,
    memberships_of_rows,
    read_classes,
    write_classes,
)
from .heads import attend_by_class, pairs_by_head
from .host_tier import TieredPool
from .kernels import KERNELS, Kernel, find_kernel, kernel_named
from .mask import EVERY, PADDING, Known, Pattern, WhoAttends, attended_pairs, count_pairs, share_a_group
from .masked import masked_attention, masked_focus_attention
from .merge import Accumulator, merge
from .one_query import attend_one_query
from .one_token import OneToken, attend_one_token
from .paths import PATHS, focus_attention
from .plan import make_plan
from .problem import Problem, Scores
from .store import PAGE, GroupedStore, TokensGone

__all__ = [
    "EVERY",
    "EVERYTHING",
    "GATES",
    "HARD_GATE",
    "GroupRows",
    "GroupedStore",
    "KERNELS",
    "MAX_GROUPS",
    "PADDING",
    "PAGE",
    "PATHS",
    "Accumulator",
    "DevicePages",
    "HeadClass",
    "HeadClasses",
    "HeadRow",
    "Kernel",
    "Known",
    "OneToken",
    "Pattern",
    "Problem",
    "Scores",
    "TieredPool",
    "TokenByNumbers",
    "TokenByRows",
    "TokensGone",
    "WhoAttends",
    "Windows",
    "attend_by_class",
    "attend_one_query",
    "attend_one_token",
    "attend_store",
    "attended_pairs",
    "biased_focus_attention",
    "columns_by_head",
    "count_pairs",
    "count_up",
    "credit_memberships",
    "find_kernel",
    "focus_attention",
    "gated_attention",
    "gather_index",
    "gathered_attention",
    "grouped_focus_attention",
    "groups_per_head",
    "head_rows",
    "keeps",
    "kernel_named",
    "make_plan",
    "masked_attention",
    "masked_focus_attention",
    "memberships_of",
    "memberships_of_columns",
    "memberships_of_rows",
    "merge",
    "nothing_read",
    "numbers_of",
    "pairs_by_head",
    "read_classes",
    "share_a_group",
    "starts_as_scores",
    "starts_of_rows",
    "takes",
    "write_classes",
]
