"""``focus_results.json``: the figures a card shows, in the same repository, so that text and data cannot disagree."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..escape import one_line, shown
from ..files import write_atomically
from .adapter_files import RESULTS_FILE, AdapterFileError, read_json
from .typed import check_types, is_number

SCHEMA = 2

#: Names of what Focus is compared with at as many pairs, and what people call them.
OPPONENTS = {
    "window": "window and sinks",
    "random": "random groups",
    "quest": "Quest, pages of 16",
    "blocks": "blocks of 64 by their mean (MoBA, untrained)",
    "slash": "vertical and slash lines (MInference)",
    "clusters": "clusters of 16 keys",
    "clusters-estimate": "clusters and estimates of the rest (RetroInfer)",
    "streaming": "streaming heads (DuoAttention)",
    "oracle": "oracle, the keys of most dense weight",
    "quest-gqa": "Quest once for a key head",
    "clusters-gqa": "clusters once for a key head",
    "clusters-estimate-gqa": "clusters and estimates once for a key head",
    "oracle-gqa": "oracle once for a key head",
}


def mode_name(mode: str, top_k: int | None = None, width: int | None = None, budget: str | None = None) -> str:
    """What people call a mode of attention.

    Args:
        mode: dense, local, soft, hard, or one of `OPPONENTS`.
        top_k: of hard, and of the Focus row that an opponent is compared with.
        width: of mode "window".
        budget: of an adapter that has several, in place of ``top_k``.
    """
    names = {"dense": "dense (base model)", "local": "window and sinks only", "soft": "soft (as in training)"}
    if mode in names:
        return names[mode]
    focus = setting_name(top_k, budget)
    if mode == "window":
        wide = "" if width is None else f" of {int(width):,}"
        return f"window{wide} and sinks, pairs of {focus}" if budget is None else f"window{wide} and sinks, {focus}"
    return f"{OPPONENTS.get(mode, 'Focus')}, {focus}"


def setting_name(top_k: int | None, budget: str | None = None) -> str:
    """What Focus is set to, as `set_routing` takes it."""
    return f"top_k={int(top_k or 0)}" if budget is None else f"pairs={float(budget):g}"


def setting(row: dict[str, Any]) -> tuple[int | None, str | None]:
    """What Focus is set to in a row, or in the row that an opponent is compared with."""
    return row.get("top_k"), row.get("budget")


def to_dense(row: dict[str, Any], dense: float) -> str:
    """Perplexity of a row over that of dense attention, less one, with its standard error over windows."""
    change = f"{100 * (row['perplexity'] / dense - 1):+.2f}"
    stderr = row.get("stderr")
    return f"{change} %" if not stderr else f"{change} ± {100 * stderr * row['perplexity'] / dense:.2f} %"


@dataclass
class Evaluation:
    """Quality on one text at one context length.

    Args:
        data: the text, in words.
        context_length: tokens per window.
        rows: one mapping a line: ``mode`` (dense, local, soft, hard, or one of `OPPONENTS`), ``top_k``, ``budget`` (of
            an adapter that has several, by its share of pairs), ``width`` (of an opponent: of the window that reads as
            many keys), ``perplexity``, ``excess`` and ``stderr`` (nats per token above dense, and the standard error
            of that over windows), ``divergence`` (of predictions from dense attention's, nats per token), ``pairs``
            (share of possible pairs that routed layers attend to), ``loaded`` (share of the keys that are loaded for
            them, once for all query heads of a key head), ``scoring`` (what choosing costs beside
            them: ``products`` and ``bytes``, as shares of dense attention's), ``positions`` (loss by position),
            ``copies`` and ``rest`` (loss in nats on tokens that were seen before, out of the window only, and on all
            others).
        stride: tokens from one window's start to the next.
        tokens: predicted tokens.
        revision: of the text: a data set's commit or a hash.
        dataset: Hub id of the data set, if it is one.
        source: how the text is read again, see `focus_hf.texts.read_again`.
        copies: of the predicted tokens, those seen before out of the window only; ``None`` in older files.

    Raises:
        ValueError: a perplexity or share of pairs is not a number that was measured.
    """

    data: str
    context_length: int
    rows: list[dict[str, Any]]
    stride: int | None = None
    tokens: int | None = None
    revision: str = ""
    dataset: str | None = None
    source: dict[str, Any] = field(default_factory=dict)
    copies: int | None = None

    def __post_init__(self) -> None:
        for row in self.rows:
            loaded = ["loaded"] if row.get("loaded") is not None else []  # older files lack it
            for name in ("perplexity", "pairs", *loaded):
                if not is_number(row[name]) or row[name] < 0 or (name == "perplexity" and not row[name]):
                    raise ValueError(
                        f"Results: {name} of mode {shown(row['mode'])} is {shown(row[name])}; measure it again."
                    )

    @property
    def key(self) -> tuple[object, ...]:
        """What was measured; see `Results.add` for what a second evaluation of the same does."""
        return self.data, self.revision, self.context_length, self.stride

    def after(self, known: Evaluation | None) -> Evaluation:
        """This one with the rows that an earlier evaluation of as much text has in other modes."""
        if known is None or known.tokens != self.tokens:
            return self
        return replace(self, rows=_renewed(known.rows, self.rows))

    def perplexity(self, mode: str, top_k: int | None = None) -> float | None:
        """Perplexity of the first such row, ``None`` where it was not measured."""
        rows = (row["perplexity"] for row in self.rows if row["mode"] == mode and row.get("top_k") == top_k)
        return next(rows, None)

    @property
    def unopposed(self) -> list[dict[str, Any]]:
        """The Focus rows without a window that attends to as many pairs beside them."""
        opposed = {setting(row) for row in self.rows if row["mode"] == "window"}
        return [row for row in self.rows if row["mode"] == "hard" and setting(row) not in opposed]

    def main(self, top_k: int, pairs: float | None) -> dict[str, Any] | None:
        """The row of Focus as the adapter is set, by its ``top_k`` and ``pairs``; the nearest where there is none."""
        hard = [row for row in self.rows if row["mode"] == "hard"]
        own = [row for row in hard if row.get("top_k") in (None, top_k)] or hard

        def off(row: dict[str, Any]) -> float:
            budget = row.get("budget")
            if pairs is None:
                return float(budget is not None)
            return abs((row["pairs"] if budget is None else float(budget)) - pairs)

        return min(own, key=off, default=None)

    def opponents(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """The rows of what attends to as many pairs as a row of Focus, the best first."""
        there = [one for one in self.rows if one["mode"] in OPPONENTS and setting(one) == setting(row)]
        return sorted(there, key=lambda one: float(one["perplexity"]))

    def change(self, top_k: int, pairs: float | None = None) -> float | None:
        """Perplexity of Focus as it is set over dense attention's, less one; ``None`` where one was not measured."""
        dense, focus = self.perplexity("dense"), self.main(top_k, pairs)
        return None if dense is None or focus is None else focus["perplexity"] / dense - 1


@dataclass
class Results:
    """Everything measured about an adapter.

    Args:
        evaluations: perplexities; the first is the one that stands on top of the card.
        retrieval: rows of the long-range probe, see `focus_hf.evaluate.RetrievalRow`.
        ruler: rows of RULER's tasks, see `focus_hf.evaluate.RulerRow`.
        code: rows of tasks on code, see `focus_hf.evaluate.CodeRow`.
        benchmarks: rows of lm-evaluation-harness, dense against Focus: ``task``, ``metric``, ``dense``, ``focus``,
            ``stderr``, ``dataset``.
        speed: rows of the benchmark, dense against Focus: ``what``, ``length``, ``num_groups``, ``top_k``, ``pairs``,
            ``dense_ms``, ``focus_ms``, ``measured_with``.
        weights_sha256: of the adapter that was measured.
        explorer: Space on the Hub that shows the groups on text, see `focus_hf.explore`.
        largest_group: share of tokens held by the largest group of any layer, after calibration.
        measured_with: versions, machine and date.
        training: hyper-parameters of the training run, its data, time and hardware.
        schema: version of this file's format.
    """

    evaluations: list[Evaluation] = field(default_factory=list)
    retrieval: list[dict[str, Any]] = field(default_factory=list)
    ruler: list[dict[str, Any]] = field(default_factory=list)
    code: list[dict[str, Any]] = field(default_factory=list)
    benchmarks: list[dict[str, Any]] = field(default_factory=list)
    speed: list[dict[str, Any]] = field(default_factory=list)
    weights_sha256: str = ""
    explorer: str | None = None
    largest_group: float | None = None
    measured_with: dict[str, str] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    def add(self, measured: Results) -> None:
        """Take over evaluations and rows; a row of the same text or prompts, in the same mode, replaces the older one.

        What was measured of other weights is no figure of this adapter any more, and goes.
        """
        rows = ("retrieval", "ruler", "code", "benchmarks")
        if self.weights_sha256 not in ("", measured.weights_sha256):
            for name in ("evaluations", "speed", *rows):
                setattr(self, name, [])
        self.weights_sha256, self.measured_with = measured.weights_sha256, measured.measured_with
        known = {evaluation.key: evaluation for evaluation in self.evaluations}
        for evaluation in measured.evaluations:
            known[evaluation.key] = evaluation.after(known.get(evaluation.key))
        self.evaluations = list(known.values())
        for name in rows:
            setattr(self, name, _renewed(getattr(self, name), getattr(measured, name)))


def _renewed(known: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Both, each new row in the place of the known one that was measured on the same, and as the same."""
    names = ("task", "metric", "length", "samples", "trials", "seed", "mode", "top_k", "budget")
    return list({tuple(row.get(name) for name in names): row for row in (*known, *new)}.values())


def save_results(results: Results, folder: str | os.PathLike[str]) -> None:
    """Write ``focus_results.json`` into an adapter's folder."""
    text = json.dumps(asdict(results), indent=2, allow_nan=False)
    write_atomically(Path(folder) / RESULTS_FILE, text.encode())


def load_results(folder: str | os.PathLike[str]) -> Results | None:
    """Read ``focus_results.json``, ``None`` if there is none; `AdapterFileError` if it cannot be read."""
    path = Path(folder) / RESULTS_FILE
    if not path.is_file():
        return None
    values = read_json(path)
    try:
        if (schema := values.pop("schema", 0)) > SCHEMA:
            raise AdapterFileError(f"{path} has schema {shown(schema)}: upgrade focus_hf")
        evaluations = [Evaluation(**evaluation) for evaluation in values.pop("evaluations", [])]
        results = Results(evaluations, **values)
        for record in (results, *evaluations):
            check_types(record)
        return results
    except AdapterFileError:
        raise
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        reason = one_line(str(error))
        raise AdapterFileError(f"{path} cannot be read ({reason}); measure the adapter again.") from None
