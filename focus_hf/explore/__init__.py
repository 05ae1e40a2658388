"""A page to look at an adapter with: what each head reads far away, in words and token by token."""

from .data import ExplorerData, Head
from .page import Page, render, write, write_space
from .read import explore

__all__ = ["ExplorerData", "Head", "Page", "explore", "render", "write", "write_space"]
