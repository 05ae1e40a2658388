"""What a token looks like: how it is shown, and properties of its text."""

from __future__ import annotations

import unicodedata

#: Properties of a token's text, as people call them. Several can hold.
PROPERTIES = (
    "punctuation", "numbers", "capitalised words", "starts of words", "inner parts of words", "line breaks and spaces",
)  # fmt: skip

_NAMED = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}


def properties(text: str, raw: str) -> set[str]:
    """Which of `PROPERTIES` hold.

    Args:
        text: decoded.
        raw: as the vocabulary writes it: byte-level and SentencePiece tokens that start a word begin with a marked
            space, WordPiece tokens that do not with ``##``.
    """
    bare = text.strip()
    if not bare:
        return {"line breaks and spaces"}
    is_word = any(character.isalpha() for character in bare)
    starts = raw.startswith(("Ġ", "▁", " ")) or (text != bare and text[:1].isspace())
    starts = starts and not raw.startswith("##")
    signs = "\ufffd" not in bare and all(unicodedata.category(character)[0] in "PS" for character in bare)
    digits = all(character.isdigit() for character in bare)
    hold = (signs, digits, is_word and bare[0].isupper(), is_word and starts, is_word and not starts)
    return {name for name, holds in zip(PROPERTIES, hold, strict=False) if holds}


def display(text: str, longest: int = 32) -> str:
    """A token as visible text: spaces, line breaks, control and direction-changing characters by their names.

    The result still has to be escaped for where it is shown (Markdown, HTML).
    """
    whole = "".join(_NAMED.get(character) or _coded(character) for character in text)
    return whole if len(whole) <= longest else whole[: longest - 1] + "…"


def _coded(character: str) -> str:
    return f"⟨U+{ord(character):04X}⟩" if unicodedata.category(character)[0] in "CZ" else character
