"""The command ``focus-hf``: thin commands over the package's functions."""

from . import hub, measure, quality
from .app import app, main

__all__ = ["app", "hub", "main", "measure", "quality"]
