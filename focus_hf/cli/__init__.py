"""The command ``focus-hf``: thin commands over the package's functions."""

from . import find, hub, make, measure
from .app import app, in_order, main

in_order()

__all__ = ["app", "find", "hub", "main", "make", "measure"]
