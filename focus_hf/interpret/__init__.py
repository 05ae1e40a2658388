"""What each group of tokens means, measured, with evidence. Needs the extra ``focus-hf[interpret]``."""

from .agreement import Agreement, agreement
from .match import Match, match_groups
from .report import GROUPS_FILE, GroupFacts, GroupReport, LayerFacts
from .run import group_report
from .treebank import Treebank, read_treebank

__all__ = [
    "GROUPS_FILE",
    "Agreement",
    "GroupFacts",
    "GroupReport",
    "LayerFacts",
    "Match",
    "Treebank",
    "agreement",
    "group_report",
    "match_groups",
    "read_treebank",
]
