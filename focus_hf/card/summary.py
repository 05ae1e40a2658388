"""The first screen of a card, from what was measured: what is gained, what is lost, against what else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..escape import escape
from ..records import AdapterConfig, GroupReport, Results
from ..records.results import OPPONENTS, Evaluation

#: No opponents: oracles know what nobody can know before, the others are controls.
NOT_RIVALS = ("oracle", "oracle-gqa", "random", "window")


@dataclass(frozen=True)
class Cell:
    """One text at one length: by how many per cent perplexity is above dense attention's.

    Args:
        focus: as the adapter is set, or at the nearest setting that was measured.
        pairs: share of the pairs that it attends to.
        rival: the best opponent of as many pairs; ``None`` where none was measured.
        rival_name: which one that is.
        window: of a window and first tokens with as many pairs.
    """

    focus: float
    pairs: float
    rival: float | None
    rival_name: str
    window: float | None


@dataclass(frozen=True)
class Summary:
    """A table of texts by lengths.

    Args:
        texts: names, in the order of the records.
        lengths: in tokens, the shortest first.
        cells: by length and text.
        main_length: the length that is told in a sentence: that of the first record.
    """

    texts: list[str]
    lengths: list[int]
    cells: dict[tuple[int, str], Cell]
    main_length: int

    @property
    def main(self) -> list[Cell]:
        """Every text at that length."""
        return [cell for (length, _), cell in self.cells.items() if length == self.main_length]

    def share(self, length: int) -> str:
        """Share of the pairs at a length, over its texts, in per cent."""
        return span([100 * cell.pairs for (at, _), cell in self.cells.items() if at == length], "{:.0f}")

    @property
    def rivals(self) -> list[str]:
        """Names of the opponents that are the best somewhere."""
        return list(dict.fromkeys(cell.rival_name for cell in self.cells.values() if cell.rival_name))

    @property
    def ahead(self) -> tuple[int, int]:
        """In how many cells Focus loses less than its best opponent, and in how many there is one."""
        others = [
            (cell.focus, [x for x in (cell.rival, cell.window) if x is not None]) for cell in self.cells.values()
        ]
        opposed = [(focus, min(losses)) for focus, losses in others if losses]
        return sum(focus < other for focus, other in opposed), len(opposed)


def summarise(results: Results | None, config: AdapterConfig) -> Summary | None:
    """The first screen's table of an adapter; ``None`` where nothing was measured beside dense attention."""
    cells: dict[tuple[int, str], Cell] = {}
    for evaluation in results.evaluations if results else ():
        if (evaluation.context_length, evaluation.data) not in cells and (cell := _cell(evaluation, config)):
            cells[evaluation.context_length, evaluation.data] = cell
    texts = list(dict.fromkeys(text for _, text in cells))
    lengths = [length for length, _ in cells]
    return Summary(texts, sorted(set(lengths)), cells, lengths[0]) if cells else None


def _cell(evaluation: Evaluation, config: AdapterConfig) -> Cell | None:
    dense, row = evaluation.perplexity("dense"), evaluation.main(config.top_k, config.pairs)
    if dense is None or row is None:
        return None

    def above(one: Mapping[str, Any] | None) -> float | None:
        return None if one is None else 100 * (float(one["perplexity"]) / dense - 1)

    against = evaluation.opponents(row)
    rival = next((one for one in against if one["mode"] not in NOT_RIVALS), None)
    window = next((one for one in against if one["mode"] == "window"), None)
    name = "" if rival is None else OPPONENTS[rival["mode"]]
    return Cell(above(row) or 0.0, float(row["pairs"]), above(rival), name, above(window))


def span(values: Sequence[float], form: str = "{:+z.1f}") -> str:
    """Values as ``least to most``, or the one that they all are when written."""
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def layers(config: AdapterConfig, report: GroupReport | None) -> str:
    """Which layers are routed, of how many."""
    if report is None or not report.attention_layers:
        return f"{config.num_layers} of its layers"
    routed, every = report.routed_layers, report.attention_layers
    if routed == every:
        return f"all {every} attention layers"
    return f"{routed} of its {every} attention layers; the other {every - routed} stay as they are"


def weights(results: Results | None) -> str:
    """Whether those of the base model are its own."""
    together = results is not None and str(results.training.get("weights", "")).endswith("trained too")
    return "the base model's weights were trained, too." if together else "the base model's weights are unchanged."


def _ratio(row: Mapping[str, Any]) -> str:
    pairs = f" ({100 * float(row['pairs']):.0f} % of the pairs)" if row.get("pairs") is not None else ""
    return f"{row['dense_ms'] / row['focus_ms']:.2f} at {int(row['length']):,} tokens{pairs}"


def speed(results: Results | None) -> str:
    """What was measured, at the shortest and the longest context of each kind; empty where nothing was."""
    told: list[str] = []
    if results is None or not results.speed:
        return ""
    names = {"prefill": "prompts", "generate": "single tokens"}
    for what in dict.fromkeys(str(row["what"]) for row in results.speed):
        rows = sorted((row for row in results.speed if row["what"] == what), key=lambda row: int(row["length"]))
        ends = [rows[0], rows[-1]] if len(rows) > 1 else rows
        told.append(f"{escape(names.get(what, what))} {', '.join(map(_ratio, ends))}")
    machine = escape(results.speed[0]["measured_with"])
    return f"times as fast as dense attention: {'; '.join(told)} (on {machine})."
