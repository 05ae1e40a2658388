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
_FOLD = re.compile(r"\s*<details>\s*<summary>(?P<summary>[^\n]*)</summary>\s*")
_REL = "noopener noreferrer nofollow"
_NOTHING = Token("", "", 0)

Link = Callable[[str], str | None]


def to_html(text: str, link: Link | None = None) -> str:
    """Markdown as HTML.

    Args:
        text: Markdown.
        link: address of a file of the repository, by its relative path; ``None`` if it has no such file.
    """
    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    tokens = _with_folds(parser.parse(text))
    for token in tokens:
        _make_safe(token.children or [], link)
    return _BIDI.sub("", parser.renderer.render(tokens, parser.options, {}))


def _with_folds(tokens: list[Token]) -> list[Token]:
    """``<details>`` with a summary, each alone in a paragraph, fold what is between them; where they do not pair, they
    are text like all other HTML. Comments between paragraphs are for tools, not for readers."""
    opened: list[tuple[int, str]] = []
    for place, token in enumerate(tokens):
        if token.type != "inline" or tokens[place - 1].type != "paragraph_open":
            continue
        if _COMMENT.fullmatch(token.content):
            tokens[place - 1 : place + 2] = [_NOTHING] * 3
        elif token.level == 1 and (fold := _FOLD.fullmatch(token.content)):
            opened.append((place, escape(unescape(fold["summary"]))))
        elif token.level == 1 and token.content.strip() == "</details>" and opened:
            begin, summary = opened.pop()
            for at, html in ((begin, f"<details>\n<summary>{summary}</summary>\n"), (place, "</details>\n")):
                tokens[at - 1 : at + 2] = [_NOTHING, Token("html_block", "", 0, content=html), _NOTHING]
    return [token for token in tokens if token is not _NOTHING]


def _make_safe(tokens: list[Token], link: Link | None) -> None:
    """Links lead where they may. A picture of the repository stays; any other is a link, which fetches nothing until
    somebody follows it."""
    inside_link = False
    for place, token in enumerate(tokens):
        if token.type in ("link_open", "link_close"):
            inside_link = token.type == "link_open"
        if token.type == "link_open":
            token.attrs = {"href": _address(str(token.attrs.get("href", "")), link) or "#", "rel": _REL}
        if token.type != "image":
            continue
        source = str(token.attrs.get("src", ""))
        address = _address(source, link)
        if address and address.startswith("/"):
            token.attrs = {"src": address, "alt": "", "loading": "lazy"}
            continue
        html = escape(f"[picture: {token.content or source}]")
        if address and not inside_link:
            html = f'<a href="{escape(address)}" rel="{_REL}">{html}</a>'
        tokens[place] = Token("html_inline", "", 0, content=html)


def _address(address: str, inside: Link | None) -> str | None:
    """A safe address: of the web, of a heading, or of a file of the repository; ``None`` for anything else."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return None
    if parts.scheme or parts.netloc:
        return address if parts.scheme in ("http", "https", "mailto") else None
    if not parts.path:
        return address if parts.fragment else None
    return inside(parts.path) if inside else None
