"""The command ``focus-hf``: thin commands over the package's functions."""

from . import groups, hub, measure, quality
from .app import app, main

__all__ = ["app", "groups", "hub", "main", "measure", "quality"]
