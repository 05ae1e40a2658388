"""Python source as a treebank: its words have gold categories, too, from Python's own tokenizer and grammar."""

from __future__ import annotations

import ast
import io
import keyword
import tokenize
from itertools import accumulate

from .windows import Document, Word

#: What a word is, by its token's name in `tokenize`, where that is not the same; of operators and names see below.
_KINDS = {"NL": "NEWLINE", "FSTRING_START": "STRING", "FSTRING_MIDDLE": "STRING", "FSTRING_END": "STRING"}

#: Line and column of the first character, as `ast` counts them: columns are bytes.
_Place = tuple[int, int]


def read_python(source: str) -> Document:
    """A module as a document; line breaks and what lines begin with are words, too.

    A word's ``upos`` says what it is: KEYWORD, OPEN and CLOSE (brackets), OPERATOR, NUMBER, STRING, COMMENT, NEWLINE,
    INDENT; and of a name what it is there for: DEFINITION (of a function or class), PARAMETER, CALL, ATTRIBUTE,
    IMPORT, TARGET (it is assigned to), VARIABLE (it is read).

    Raises:
        ValueError: it is no Python.
    """
    try:
        tree = ast.parse(source)
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (SyntaxError, tokenize.TokenError, RecursionError) as error:
        raise ValueError(f"no Python that this version reads ({error})") from None
    lines = list(io.StringIO(source))
    starts = list(accumulate(map(len, lines), initial=0))
    roles = _roles(tree)
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    imports = {line for node in statements for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    words: list[Word] = []
    before = ""
    for token in tokens:
        (row, column), (last, end) = token.start, token.end
        kind = _kind(token)
        if kind == "NAME" and before in ("def", "class"):
            kind = "DEFINITION"
        elif kind == "NAME":
            otherwise = "IMPORT" if row in imports else "VARIABLE"
            kind = roles.get((row, len(lines[row - 1][:column].encode())), otherwise)
        start, stop = starts[row - 1] + column, min(starts[last - 1] + end, len(source))
        if kind and start < stop:
            first = source[starts[row - 1] : start]
            if first.isspace():
                words.append(Word(starts[row - 1], start, "INDENT"))
            words.append(Word(start, stop, kind))
        before = token.string
    return Document(source, words)


def _kind(token: tokenize.TokenInfo) -> str | None:
    name = tokenize.tok_name[token.type]
    if name == "OP":
        return "OPEN" if token.string in "([{" else "CLOSE" if token.string in ")]}" else "OPERATOR"
    if name == "NAME":
        return "KEYWORD" if keyword.iskeyword(token.string) else "NAME"
    kind = _KINDS.get(name, name)
    return kind if kind in ("NUMBER", "STRING", "COMMENT", "NEWLINE") else None


def _roles(tree: ast.AST) -> dict[_Place, str]:
    """What names are there for."""
    found: dict[_Place, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found[_last_name(node.func)] = "CALL"
        elif isinstance(node, ast.Attribute):
            found.setdefault(_last_name(node), "ATTRIBUTE")
        elif isinstance(node, ast.Name):
            found.setdefault(_last_name(node), "VARIABLE" if isinstance(node.ctx, ast.Load) else "TARGET")
        elif isinstance(node, ast.arg | ast.keyword):
            found[node.lineno, node.col_offset] = "PARAMETER"
        elif isinstance(node, ast.alias):
            found[node.lineno, node.col_offset] = "IMPORT"
    return found


def _last_name(node: ast.expr) -> _Place:
    """Of ``a.b.c`` where ``c`` begins."""
    if isinstance(node, ast.Attribute) and node.end_lineno is not None and node.end_col_offset is not None:
        return node.end_lineno, node.end_col_offset - len(node.attr.encode())
    return node.lineno, node.col_offset
