"""Two adapters of one base model beside each other, by their records: which is for whom."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from .card.summary import Cell, summarise
from .records import check_adapter, load_results

#: Differences of perplexity, in per cent, and of the share of pairs, that count as none.
ALIKE, AS_MANY = 0.1, 0.02


@dataclass(frozen=True)
class Compared:
    """Both on the same text and length.

    Args:
        text: its name.
        length: tokens.
        sides: of the first and the second adapter what its card has.
    """

    text: str
    length: int
    sides: tuple[Cell, Cell]

    @property
    def better(self) -> int | None:
        """Which loses less and does not attend to more pairs; ``None`` where neither does."""
        for one, other in ((0, 1), (1, 0)):
            mine, theirs = self.sides[one], self.sides[other]
            if mine.focus < theirs.focus - ALIKE and mine.pairs <= theirs.pairs + AS_MANY:
                return one
        return None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        sides = [{"loss": side.focus, "pairs": side.pairs} for side in self.sides]
        return {"text": self.text, "length": self.length, "sides": sides, "better": self.better}


def compare_adapters(folders: Sequence[str | os.PathLike[str]]) -> list[Compared]:
    """What two adapters of one base model lose on the texts and lengths on which both were measured.

    Args:
        folders: of the two.

    Raises:
        ValueError: they are not two, not of one base model, or nothing was measured on both.
    """
    if len(folders) != 2:
        raise ValueError(f"Two adapters are compared, got {len(folders)}: give --adapter twice.")
    configs = [check_adapter(folder) for folder in folders]
    bases = [config.base_model_name_or_path for config in configs]
    if bases[0] != bases[1]:
        raise ValueError(f"The adapters are of two base models, {bases[0]} and {bases[1]}: compare those of one.")
    summaries = [summarise(load_results(folder), config) for folder, config in zip(folders, configs, strict=True)]
    one, other = (summary.cells if summary else {} for summary in summaries)
    both = sorted(one.keys() & other.keys())
    if not both:
        raise ValueError(
            "No text and length was measured on both adapters: focus-hf eval --adapter ... --text ... --write"
        )
    return [Compared(text, length, (one[length, text], other[length, text])) for length, text in both]


def adapters_table(names: Sequence[str], rows: Sequence[Compared]) -> Table:
    """For the screen: a line for each length and text, and for whom each adapter is."""
    table = Table(title=Text(f"{names[0]} and {names[1]}: perplexity above dense attention's"), title_justify="left")
    for place, column in enumerate(("tokens", "text", *names)):
        table.add_column(Text(column), justify="left" if place == 1 else "right", overflow="fold")
    for row in rows:
        cells = [
            Text(
                f"{side.focus:+.1f} % ({100 * side.pairs:.0f} % of pairs)", style="bold" if row.better == place else ""
            )
            for place, side in enumerate(row.sides)
        ]
        table.add_row(f"{row.length:,}", Text(row.text), *cells)
    table.caption = Text(" ".join(for_whom(name, place, rows) for place, name in enumerate(names)))
    table.caption_justify = "left"
    return table


def for_whom(name: str, place: int, rows: Sequence[Compared]) -> str:
    """In a sentence: on which texts an adapter loses less with no more pairs, at every length or at some."""
    told = []
    for text in dict.fromkeys(row.text for row in rows):
        of_text = [row for row in rows if row.text == text]
        won = [row for row in of_text if row.better == place]
        if won:
            told.append(text if len(won) == len(of_text) else f"{text} at {', '.join(f'{r.length:,}' for r in won)}")
    return f"{name} is for: {', '.join(told)}." if told else f"{name} is nowhere better by more than {ALIKE} %."
