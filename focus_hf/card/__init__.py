"""The card of an adapter: from its records to a page and to metadata. Nothing here needs torch."""

from .card import FocusModelCard

__all__ = ["FocusModelCard"]
