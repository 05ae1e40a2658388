"""What each group of tokens means, measured, with evidence. Needs the extra ``focus-hf[interpret]``."""

from ..records.group_report import GroupFacts, GroupReport, LayerFacts
from .agreement import agreement
from .match import LayerMatch, Match, match_adapters, match_groups
from .run import group_report
from .treebank import Treebank, read_treebank

__all__ = [
    "GroupFacts",
    "GroupReport",
    "LayerFacts",
    "LayerMatch",
    "Match",
    "Treebank",
    "agreement",
    "group_report",
    "match_adapters",
    "match_groups",
    "read_treebank",
]
