"""The command ``focus-hf``: thin commands over the package's functions."""

from . import explore, find, fit, groups, hub, measure, quality, verify
from .app import app
from .start import main

__all__ = ["app", "explore", "find", "fit", "groups", "hub", "main", "measure", "quality", "verify"]
