"""Sections of a card: what this package writes stands between markers, everything else is somebody's own words."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

#: The first line of the text of a card that this package wrote, with the names of the sections that it wrote.
_HEADER = re.compile(r"<!-- focus_hf:card(?P<names>(?: [a-z_]+)*) -->\n?")
_BEGIN = re.compile(r"<!-- focus_hf:begin (?P<name>[a-z_]+)(?: (?P<hash>[0-9a-f]{12}))? -->\n")
_END = re.compile(r"<!-- focus_hf:end (?P<name>[a-z_]+) -->\n?")


@dataclass(frozen=True)
class Section:
    """A part of a card: words of a person (no ``name``), or a section that this package wrote.

    Args:
        body: the text.
        name: of the section.
        hash: of the text when it was written; another text now means that somebody has changed it.
    """

    body: str
    name: str | None = None
    hash: str | None = None

    @property
    def edited(self) -> bool:
        """Whether a person has changed the text of a section."""
        return self.name is not None and self.hash is not None and self.hash != _hash(self.body)

    def __str__(self) -> str:
        if self.name is None:
            return self.body
        recorded = self.hash or _hash(self.body)
        body = self.body.strip("\n")  # an empty line around it: right behind a table, the marker would be a row of it
        return f"<!-- focus_hf:begin {self.name} {recorded} -->\n\n{body}\n\n<!-- focus_hf:end {self.name} -->\n"


@dataclass(frozen=True)
class CardText:
    """The text of a card, without its metadata.

    Args:
        parts: in order.
        written: names of the sections that were there when the card was made; ``None`` for a card of other origin.
    """

    parts: Sequence[Section]
    written: frozenset[str] | None = None

    @classmethod
    def parse(cls, text: str) -> CardText:
        header = _HEADER.search(text)
        written = None if header is None else frozenset(header["names"].split())
        text = _HEADER.sub("", text).lstrip("\n")
        parts: list[Section] = []
        done = 0
        for begin, end in _pairs(text):
            body = text[begin.end() : end.start()]
            parts += [Section(text[done : begin.start()]), Section(body, begin["name"], begin["hash"])]
            done = end.end()
        parts.append(Section(text[done:]))
        return cls([part for part in parts if part.name is not None or part.body], written)

    @property
    def names(self) -> list[str]:
        """Sections that are there, in order."""
        return [part.name for part in self.parts if part.name is not None]

    @property
    def known(self) -> frozenset[str]:
        """Sections that are there, or were: those that are gone a person has removed."""
        return frozenset(self.names).union(self.written or ())

    @property
    def own_words(self) -> str:
        """What a person wrote: everything outside the sections, and sections that somebody has changed."""
        return "\n".join(part.body.strip() for part in self.parts if part.name is None or part.edited).strip()

    @property
    def edited(self) -> list[str]:
        """Names of sections that somebody has changed."""
        return [part.name for part in self.parts if part.name is not None and part.edited]

    def refreshed(self, new: CardText) -> CardText:
        """This text with the sections of a newer one, which was freshly made.

        Sections that somebody has changed stay as they are, and sections that somebody has removed stay away.
        """
        fresh = {part.name: part for part in new.parts if part.name is not None}
        parts = [part if part.name is None or part.edited else fresh.get(part.name) for part in self.parts]
        text = [part for part in parts if part is not None]
        for place, name in enumerate(new.names):
            if name not in self.known:
                _insert(text, fresh[name], new.names[:place])
        return CardText(text, self.known.union(new.names))

    def __str__(self) -> str:
        head = f"<!-- {' '.join(['focus_hf:card', *sorted(self.known)])} -->\n"
        return head + "".join(map(str, self.parts)).lstrip("\n")


def _pairs(text: str) -> Iterator[tuple[re.Match[str], re.Match[str]]]:
    """Where sections begin and end. Each marker is looked at once: a stranger may open thousands of sections."""
    ends: dict[str, deque[re.Match[str]]] = defaultdict(deque)
    for end in _END.finditer(text):
        ends[end["name"]].append(end)
    done = 0
    for begin in _BEGIN.finditer(text):
        waiting = ends[begin["name"]]
        while waiting and waiting[0].start() < begin.end():
            waiting.popleft()
        if waiting and begin.start() >= done:
            done = waiting[0].end()
            yield begin, waiting[0]


def _insert(parts: list[Section], section: Section, before: Sequence[str]) -> None:
    """Put a section after the nearest of those that come before it, or at the end."""
    for name in reversed(before):
        for place, part in enumerate(parts):
            if part.name == name:
                parts[place + 1 : place + 1] = [Section("\n"), section]
                return
    if parts:
        above = str(parts[-1])
        parts.append(Section("\n" * (2 - (len(above) - len(above.rstrip("\n"))) if parts[-1].name is None else 1)))
    parts.append(section)


def _hash(body: str) -> str:
    return hashlib.sha256(body.strip().encode()).hexdigest()[:12]
