"""The card of an adapter: from its records to a page and to metadata. Nothing here needs torch."""

from .card import FocusModelCard, write_card

__all__ = ["FocusModelCard", "write_card"]
