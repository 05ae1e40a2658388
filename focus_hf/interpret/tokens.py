"""What a token looks like: how it is shown, and its orthographic profile."""

from __future__ import annotations

import unicodedata

#: Properties of a token's text. Several can hold.
PROFILE = ("punctuation", "digits", "capitalised", "word-initial", "sub-word", "whitespace", "other")

_NAMED = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}


def profile(text: str, raw: str) -> tuple[bool, ...]:
    """Which of `PROFILE` hold.

    Args:
        text: decoded.
        raw: as the vocabulary writes it: byte-level and SentencePiece tokens that start a word begin with a marked
            space, WordPiece tokens that do not with ``##``.
    """
    bare = text.strip()
    if not bare:
        return (False, False, False, False, False, True, False)
    is_word = any(character.isalpha() for character in bare)
    starts = raw.startswith(("Ġ", "▁", " ")) or (text != bare and text[:1].isspace())
    starts = starts and not raw.startswith("##")
    punctuation = "\ufffd" not in bare and all(unicodedata.category(character)[0] in "PS" for character in bare)
    digits = all(character.isdigit() for character in bare)
    kinds = (punctuation, digits, is_word and bare[0].isupper(), is_word and starts, is_word and not starts)
    return (*kinds, False, not any(kinds))


def display(text: str, longest: int = 32) -> str:
    """A token as visible text: spaces, line breaks, control and direction-changing characters by their names.

    The result still has to be escaped for where it is shown (Markdown, HTML).
    """
    whole = "".join(_NAMED.get(character) or _coded(character) for character in text)
    return whole if len(whole) <= longest else whole[: longest - 1] + "…"


def _coded(character: str) -> str:
    return f"⟨U+{ord(character):04X}⟩" if unicodedata.category(character)[0] in "CZ" else character
