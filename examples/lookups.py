"""Text to fit to in which made-up names are told and said again, far apart: ordinary text has little of that.

    python examples/lookups.py --between novel.txt --between code.txt > lookups.txt
    focus-hf fit --model org/base --train-file novel.txt --train-file code.txt --train-file lookups.txt ...

Random names and values teach a router to look up what no text has said before (docs/fitting.md, "What text"). Lines of
your own texts stand between them, so that what is looked up is far away.
"""

from __future__ import annotations

import argparse
import random
import string
from collections.abc import Iterator, Sequence
from pathlib import Path

FORMS = (
    *("{} = {}", "{}: {}", "set {} {}", '"{}": "{}",', "let {} = {};", "{}\t{}", "{} -> {}", "{}={}", "| {} | {} |"),
    "The code of {} is {}.",
)
LETTERS = (string.ascii_uppercase, string.ascii_lowercase, string.ascii_letters + string.digits)

#: Of the lines, those of other text; of those that tell something, the new ones; of which a name is another's value.
BETWEEN, NEW, PASSED_ON = 0.3, 0.45, 0.3

#: How often the form of lines changes: once in so many.
CHANGES = 33


def lookups(lines: int, between: Sequence[str], seed: int) -> Iterator[str]:
    """Lines that tell a made-up name's value, or tell one again, among others."""
    draw = random.Random(seed)

    def name() -> str:
        return "".join(draw.choices(draw.choice(LETTERS), k=draw.randint(3, 9)))

    known: list[tuple[str, str]] = []
    form = draw.choice(FORMS)
    for _ in range(lines):
        if draw.random() < 1 / CHANGES:
            form = draw.choice(FORMS)
        if between and draw.random() < BETWEEN:
            yield draw.choice(between)
            continue
        if draw.random() < NEW or not known:
            value = str(draw.randint(10, 99999)) if draw.random() < 0.5 else name()
            if known and draw.random() < PASSED_ON:
                value = draw.choice(known)[0]
            known.append((name(), value))
            yield form.format(*known[-1])
        else:
            yield form.format(*draw.choice(known[-200:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=10_000, help="how many; 10,000 are some 120,000 tokens")
    parser.add_argument("--between", type=Path, action="append", default=[], help="a text; may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    texts = [line for file in args.between for line in file.read_text(encoding="utf-8").splitlines()]
    between = [line for line in texts if 30 < len(line) < 160 and any(map(str.isalpha, line))]
    for line in lookups(args.lines, between, args.seed):
        print(line)


if __name__ == "__main__":
    main()
