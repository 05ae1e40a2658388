"""The card that a push sends, made from ours, the folder's and the Hub's; nobody's words are lost."""

from __future__ import annotations

import difflib

from ..card.card import FocusModelCard
from ..card.read import is_ours, own_words, read_metadata
from ..card.sections import CardText
from ..escape import one_line
from ..front_matter import card_metadata
from ..records.base_model import BaseFacts

#: Lines of a card that are compared with another; the time it takes grows with their square.
_MOST_LINES = 5_000


def merge_cards(made: FocusModelCard, written: str | None, remote: str | None, force: bool, notes: list[str]) -> str:
    """The card to push, from the one made now, the folder's and the Hub's; nobody's words are lost.

    Raises:
        ValueError: the folder's card and the Hub's both hold words that the other lacks, or one cannot be read.
    """
    remote = None if force else remote
    for card, where in ((remote, "on the Hub"), (written, "in the folder")):
        try:
            card_metadata(card or "")
        except ValueError as error:
            raise ValueError(
                f"The README.md {where} has metadata that cannot be read ({one_line(str(error))}): mend it there, or "
                "replace the one on the Hub with force (--force)."
            ) from None
    older = [card for card in (remote, written) if card is not None]
    words = {own for card in older if (own := own_words(card))}
    if len(words) > 1:
        raise ValueError(
            "The card on the Hub has words that the folder's README.md lacks, and the other way round: bring them "
            "together in the folder's and pass force (--force), which replaces the one on the Hub."
        )
    if any(own_words(card) and not is_ours(card) for card in older):
        notes.append("The card was written by hand: its words stay, ours follow them (--force replaces it).")
    merged = made.refreshing(*older)
    if edited := CardText.parse(merged.text).edited:
        notes.append(f"Changed by hand and left as they are: sections {', '.join(edited)} of the card.")
    return str(merged)


def difference(old: str, new: str) -> str:
    """What becomes of a card, as ``diff -u`` shows it; of one that is very long, how long it was and is."""
    before, after = old.splitlines(), new.splitlines()
    if max(len(before), len(after)) > _MOST_LINES:
        return f"(a card of {len(before):,} lines becomes one of {len(after):,})"
    return "\n".join(difflib.unified_diff(before, after, "card on the Hub", "card to push", lineterm=""))


def missing_licence(card: str, base: BaseFacts | None) -> list[str]:
    """A note if a card states no licence, and why it does not."""
    if read_metadata(card).get("license"):
        return []
    reason = "the base model's page does not state one" if base else "the base model was not found on the Hub"
    return [f"The card states no licence: {reason}. Give one with license (--license)."]
