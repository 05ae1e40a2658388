"""Text and values from outside, shown as text."""

from __future__ import annotations

import re
import reprlib
import unicodedata


def escape(value: object) -> str:
    """Text from outside (a model, a data set, a name) as text in Markdown, never as markup.

    Characters that Markdown or HTML give a meaning become character references; line breaks become spaces; invisible
    and direction-changing characters are dropped.
    """
    text = re.sub(r"\s+", " ", str(value)).strip()
    text = "".join(c for c in text if unicodedata.category(c) not in ("Cc", "Cf", "Co", "Cs"))
    return re.sub(r"[&<>|`*_{}\[\]()#$~\\!]|(?<!\w)[-+=]|:(?=//)", lambda m: f"&#{ord(m.group())};", text)


def one_line(text: str, limit: int = 200) -> str:
    """Text from outside in an error message: one line of printable characters, cut after ``limit`` of them."""
    short = text if len(text) <= limit else text[:limit] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)


def shown(value: object) -> str:
    """A value from outside in an error message, as Python writes it: one line, short whatever the value is."""
    if isinstance(value, int) and value.bit_length() > 100:
        return f"an integer of {value.bit_length()} bits"  # Python itself refuses to write the longest ones
    return one_line(_SHORT.repr(value), 100)


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 60, 60
