"""A text as tokens: their ids, and what each of them adds to the text as one reads it."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..texts import first_tokens, room_after

#: Invisible characters that letters and emoji need in order to join; they are harmless. Spaces and breaks stay, too.
_KEPT = "\u200c\u200d\ufe0f\n\t"


class Passage(NamedTuple):
    """A window of a document: token ids, int64 ``(T,)``, and what each token adds to the text; empty for a token that
    continues a character."""

    ids: Tensor
    pieces: list[str]


def passages(tokenizer: Any, texts: Sequence[str], max_tokens: int, window: int) -> tuple[list[Passage], int]:
    """Cut texts into windows, begun as the tokenizer begins a text; a window holds tokens of one text only.

    Args:
        tokenizer: a transformers tokenizer.
        texts: one or several.
        max_tokens: stop after so many.
        window: tokens of a window at most.

    Returns:
        The windows, and how many tokens of the texts are left out.

    Raises:
        ValueError: there is no token.
    """
    found: list[Passage] = []
    room, left_out = max_tokens, 0
    is_fast, first = getattr(tokenizer, "is_fast", False), first_tokens(tokenizer)
    of_text = room_after(first, window)
    shown_first = [visible(str(piece)) for piece in tokenizer.convert_ids_to_tokens(first)] if first else []
    for text in texts:
        coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=is_fast, verbose=False)
        ids = coded["input_ids"]
        spans = _spans(text, coded["offset_mapping"]) if is_fast else (_decoded(tokenizer, token) for token in ids)
        pieces = [visible(span) for span in spans]
        left_out += max(0, len(ids) - room)
        kept = min(room, len(ids))
        room -= kept
        for start in range(0, kept, of_text):
            part = slice(start, min(start + of_text, kept))
            found.append(Passage(torch.tensor([*first, *ids[part]], dtype=torch.long), [*shown_first, *pieces[part]]))
    if not found:
        raise ValueError("The text has no tokens; give more.")
    return found, left_out


def _spans(text: str, offsets: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Slices of the text that together are the text: what a tokenizer drops goes to the token after it, and the tokens
    of one character leave it to the first of them."""
    shown = 0
    for _, stop in offsets:
        yield text[shown:stop]
        shown = max(shown, stop)


def _decoded(tokenizer: Any, token: int) -> str:
    """For tokenizers that do not say where their tokens stand; SentencePiece drops a leading space when it decodes."""
    text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    starts_word = str(tokenizer.convert_ids_to_tokens([token])[0]).startswith("▁")
    return f" {text}" if starts_word and not text[:1].isspace() else text


def visible(text: str) -> str:
    """Text as one reads it, with characters that would be invisible or turn the direction of others shown by their
    codes. Spaces, line breaks and tabs stay."""
    if text.isprintable():
        return text
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    kept = (c in _KEPT or c.isprintable() or unicodedata.category(c) == "Zs" for c in text)
    return "".join(c if is_kept else f"⟨U+{ord(c):04X}⟩" for c, is_kept in zip(text, kept, strict=True))
