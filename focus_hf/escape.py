"""Text from outside, shown as text."""

from __future__ import annotations

import re
import unicodedata


def escape(value: object) -> str:
    """Text from outside (a model, a data set, a name) as text in Markdown, never as markup.

    Characters that Markdown or HTML give a meaning become character references; line breaks become spaces; invisible
    and direction-changing characters are dropped.
    """
    text = re.sub(r"\s+", " ", str(value)).strip()
    text = "".join(c for c in text if unicodedata.category(c) not in ("Cc", "Cf", "Co", "Cs"))
    return re.sub(r"[&<>|`*_{}\[\]()#$~\\!]|(?<!\w)[-+=]|:(?=//)", lambda m: f"&#{ord(m.group())};", text)
