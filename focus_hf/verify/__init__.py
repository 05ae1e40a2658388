"""Measure a card's claims again, on this machine."""

from .claims import DIFFERS, HOLDS, UNCHECKED, Claim
from .run import verify

__all__ = ["DIFFERS", "HOLDS", "UNCHECKED", "Claim", "verify"]
