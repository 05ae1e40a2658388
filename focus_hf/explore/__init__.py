"""A page to look at an adapter with: what every token's group is, what it attends to far away, and what no longer."""

from .data import ExplorerData, GroupNote, LayerView, Side
from .page import Page, render, write
from .run import Subject, explore
from .space import write_space

__all__ = [
    "ExplorerData",
    "GroupNote",
    "LayerView",
    "Page",
    "Side",
    "Subject",
    "explore",
    "render",
    "write",
    "write_space",
]
