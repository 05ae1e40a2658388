"""A page to look at an adapter with: what each head reads far away, in words and token by token."""

from .data import ExplorerData, Head
from .page import Page, render, write
from .read import explore
from .space import write_space

__all__ = ["ExplorerData", "Head", "Page", "explore", "render", "write", "write_space"]
