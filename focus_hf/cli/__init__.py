"""The command ``focus-hf``: thin commands over the package's functions."""

from . import explore, find, groups, hub, measure, verify
from .app import app
from .start import load_commands, main

__all__ = ["app", "explore", "find", "groups", "hub", "load_commands", "main", "measure", "verify"]
