"""What a token looks like: how it is shown, and its orthographic profile."""

from __future__ import annotations

import unicodedata
from typing import Any

import numpy as np

#: Properties of a token's text. Several can hold.
PROFILE = ("punctuation", "digits", "capitalised", "word-initial", "sub-word", "whitespace", "other")

#: Characters shown of a long token.
_LONGEST = 32


def token_texts(tokenizer: Any, token_ids: np.ndarray) -> dict[int, str]:
    """Each token's text as it stands in a sentence, with its leading space."""
    return {int(i): tokenizer.decode([int(i)], clean_up_tokenization_spaces=False) for i in token_ids}


def raw_tokens(tokenizer: Any, token_ids: np.ndarray) -> dict[int, str]:
    """Each token as the vocabulary writes it, from which one sees whether it starts a word."""
    ids = [int(i) for i in token_ids]
    return dict(zip(ids, map(str, tokenizer.convert_ids_to_tokens(ids)), strict=True))


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
    properties = (
        punctuation,
        digits,
        is_word and bare[0].isupper(),
        is_word and starts,
        is_word and not starts,
        False,
    )
    return (*properties, not any(properties))


def display(text: str, longest: int = _LONGEST) -> str:
    """A token as visible text: spaces, line breaks, control and direction-changing characters by their names.

    The result still has to be escaped for where it is shown (Markdown, HTML).
    """
    shown = []
    for character in text:
        if character == " ":
            shown.append("␣")
        elif character in _NAMED:
            shown.append(_NAMED[character])
        elif unicodedata.category(character)[0] in "CZ":
            shown.append(f"⟨U+{ord(character):04X}⟩")
        else:
            shown.append(character)
    whole = "".join(shown)
    return whole if len(whole) <= longest else whole[: longest - 1] + "…"


_NAMED = {"\n": "⏎", "\t": "⇥", "\r": "␍"}
