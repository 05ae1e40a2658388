"""Cards as HTML: what strangers wrote, made safe to look at.

Markdown, and folds: any other HTML in a card is shown as text, links lead to pages and mail, and pictures come
from the repository itself, as the pages fetch nothing from anywhere else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape, unescape
from urllib.parse import urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token

#: Characters that reverse the order in which text is shown, so that it reads as something else.
_BIDI = re.compile("[\u202a-\u202e\u2066-\u2069]")
_COMMENT = re.compile(r"(?:\s*<!--(?:(?!-->).)*-->\s*)+", re.DOTALL)
_FOLD = re.compile(r"<details>\s*<summary>(?P<summary>[^\n]*)</summary>")
_SCHEMES = ("http", "https", "mailto")
_REL = "noopener noreferrer nofollow"

Link = Callable[[str], str | None]


def to_html(text: str, link: Link | None = None) -> str:
    """Markdown as HTML.

    Args:
        text: Markdown.
        link: address of a file of the repository, by its relative path; ``None`` if it has no such file.
    """
    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    tokens = _with_folds(_without_comments(parser.parse(text)))
    for token in tokens:
        if token.children:
            token.children = _inline(token.children, link)
    return without_overrides(parser.renderer.render(tokens, parser.options, {}))


def without_overrides(text: str) -> str:
    return _BIDI.sub("", text)


def _without_comments(tokens: list[Token]) -> list[Token]:
    """HTML comments between paragraphs are for tools, not for readers."""
    kept: list[Token] = []
    for token in tokens:
        if token.type == "paragraph_close" and _COMMENT.fullmatch(kept[-1].content):
            del kept[-2:]
        else:
            kept.append(token)
    return kept


def _with_folds(tokens: list[Token]) -> list[Token]:
    """``<details>`` with a summary, each alone in a paragraph, fold what is between them; where they do not pair, they
    are text like all other HTML."""
    opened: list[int] = []
    pairs: dict[int, int] = {}
    for place, token in enumerate(tokens):
        if token.type != "inline" or token.level != 1:
            continue
        if _FOLD.fullmatch(token.content.strip()):
            opened.append(place)
        elif token.content.strip() == "</details>" and opened:
            pairs[opened.pop()] = place
    kept: list[Token | None] = list(tokens)
    for begin, end in pairs.items():
        (found,) = [match["summary"] for match in [_FOLD.fullmatch(tokens[begin].content.strip())] if match]
        summary = escape(unescape(found))
        for place, html in ((begin, f"<details>\n<summary>{summary}</summary>\n"), (end, "</details>\n")):
            kept[place - 1 : place + 2] = [None, Token("html_block", "", 0, content=html), None]
    return [token for token in kept if token is not None]


def _inline(tokens: list[Token], link: Link | None) -> list[Token]:
    changed: list[Token] = []
    inside_link = False
    for token in tokens:
        if token.type in ("link_open", "link_close"):
            inside_link = token.type == "link_open"
        if token.type == "link_open":
            address = _address(str(token.attrs.get("href", "")), link)
            token.attrs = {"href": address or "#", "rel": _REL}
        if token.type == "image":
            changed += _image(token, link, inside_link)
        else:
            changed.append(token)
    return changed


def _image(token: Token, link: Link | None, inside_link: bool) -> list[Token]:
    """A picture of the repository as such; any other as a link, which fetches nothing until somebody follows it."""
    source = str(token.attrs.get("src", ""))
    address = _address(source, link)
    if address is not None and address.startswith("/"):
        token.attrs = {"src": address, "alt": "", "loading": "lazy"}
        return [token]
    label = Token("text", "", 0, content=f"[picture: {token.content or source}]")
    if address is None or inside_link:
        return [label]
    opened = Token("link_open", "a", 1, attrs={"href": address, "rel": _REL})
    return [opened, label, Token("link_close", "a", -1)]


def _address(address: str, inside: Link | None) -> str | None:
    """A safe address: of the web, of a heading, or of a file of the repository; ``None`` for anything else."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return None
    if parts.scheme or parts.netloc:
        return address if parts.scheme in _SCHEMES else None
    if not parts.path:
        return address if parts.fragment else None
    return inside(parts.path) if inside else None
