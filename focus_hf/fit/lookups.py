"""Text to fit to in which made-up names are told and said again, far apart: ordinary text has little of that.

Random names and values teach a router to look up what no text has said before.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Sequence

from ..texts import Texts

FORMS = (
    *("{} = {}", "{}: {}", "set {} {}", '"{}": "{}",', "let {} = {};", "{}\t{}", "{} -> {}", "{}={}", "| {} | {} |"),
    "The code of {} is {}.",
)
LETTERS = (string.ascii_uppercase, string.ascii_lowercase, string.ascii_letters + string.digits)

#: Of the lines, those of other text; of those that tell something, the new ones; of which a name is another's value.
BETWEEN, NEW, PASSED_ON = 0.3, 0.45, 0.3

#: How often the form of lines changes (once in so many), and of how many names, the last ones, one is said again.
CHANGES, KNOWN = 33, 200

#: Characters of a line of other text.
SHORTEST, LONGEST = 30, 160


def lookups(texts: Sequence[Texts], lines: int, seed: int) -> Texts:
    """Made-up lookups, with lines of other texts between them.

    Args:
        texts: those to take lines from.
        lines: how many to make.
        seed: of what is made up.
    """
    whole = (line for text in texts for document in text.documents for line in document.splitlines())
    between = [line[:LONGEST] for line in whole if len(line) > SHORTEST]
    return Texts(["\n".join(_lines(lines, between, random.Random(seed)))], "made-up lookups", f"seed {seed}")


def _lines(count: int, between: Sequence[str], draw: random.Random) -> Iterator[str]:
    """Lines that tell a made-up name's value, or tell one again, among others."""

    def name() -> str:
        return "".join(draw.choices(draw.choice(LETTERS), k=draw.randint(3, 9)))

    known: list[tuple[str, str]] = []
    names: set[str] = set()
    form = draw.choice(FORMS)
    for _ in range(count):
        if draw.random() < 1 / CHANGES:
            form = draw.choice(FORMS)
        if between and draw.random() < BETWEEN:
            yield draw.choice(between)
            continue
        if draw.random() < NEW or not known:
            value = str(draw.randint(10, 99999)) if draw.random() < 0.5 else name()
            if known and draw.random() < PASSED_ON:
                value = draw.choice(known)[0]
            while (new := name()) in names:
                pass
            names.add(new)
            known.append((new, value))
            yield form.format(new, value)
        else:
            yield form.format(*draw.choice(known[-KNOWN:]))
