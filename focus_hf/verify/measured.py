"""Claims that are checked by running the adapter."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..evaluate import Mode, SlidingWindows, measure_quality
from ..evaluate.leave import take_sample
from ..interpret import group_report, read_treebank
from ..records import Evaluation, GroupReport, LayerFacts, Results
from ..records.sample import TokenSample, same_groups
from ..texts import Texts, first_tokens, hash_of, read_again
from ..train.calibration import calibration_sample, largest_groups
from .claims import DIFFERS, HOLDS, Claim, at_most, close, same, unchecked

#: How far a number may be off: other machines and kernels round differently.
SAME_GROUP, PERPLEXITY, SHARE, AGREEMENT = 0.99, 0.005, 0.01, 0.01
BALANCE, LOSS, NAME, COPIES, DIVERGENCE = 0.01, 0.002, 0.05, 0.02, 0.002


def check_sample(model: nn.Module, sample: TokenSample | None) -> Iterator[Claim]:
    """The groups of the recorded tokens."""
    if sample is None:
        yield unchecked("groups of a recorded sample", "", "none was recorded")
        return
    again = take_sample(model, torch.tensor(sample.ids))
    what, note = f"groups of {len(sample.ids)} recorded tokens, same", f"at least {SAME_GROUP:.0%}"
    yield close(what, 1.0, same_groups(sample, again), 1 - SAME_GROUP, "{:.1%}", note)
    if sample.reads:
        one, two = (sum(map(sum, found.reads.values())) for found in (sample, again))
        yield close("cells that the recorded tokens read", one, two, (1 - SAME_GROUP) * one, "{:,.0f}")


def check_perplexities(
    model: nn.Module,
    tokenizer: Any,
    results: Results,
    files: Sequence[str],
    tick: Callable[[str], None],
    lengths: Collection[int] | None = None,
) -> Iterator[Claim]:
    """Every perplexity of the card whose text can be had, or those at some context lengths."""
    for evaluation in results.evaluations:
        name = f"perplexity on {evaluation.data}, {evaluation.context_length} tokens"
        if lengths is not None and evaluation.context_length not in lengths:
            yield unchecked(name, len(evaluation.rows), "another length was asked for")
            continue
        text = read_again(evaluation.source, evaluation.revision, files)
        try:
            windows = _windows(text, tokenizer, evaluation)
        except ValueError as error:
            yield unchecked(name, len(evaluation.rows), str(error))
            continue
        rows = sorted(evaluation.rows, key=lambda row: row["mode"] != "dense")  # the order of measure_quality
        modes = list(map(Mode.of, rows))
        for row, mode, here in zip(rows, modes, measure_quality(model, windows, modes), strict=True):
            tick(f"{name}: {here}")
            claimed, pairs = float(row["perplexity"]), float(row["pairs"])
            holds = abs(here.perplexity - claimed) <= PERPLEXITY * claimed and abs(here.pairs - pairs) <= SHARE
            # In nats; of copies there may be few.
            for part, tolerance in (("copies", COPIES), ("rest", COPIES), ("divergence", DIVERGENCE)):
                was, now = row.get(part), getattr(here, part)
                holds = holds and (was is None or now is None or abs(was - now) <= tolerance)
            yield Claim(
                f"{name}: {mode}",
                f"{claimed:.3f} ({100 * pairs:.1f} % of pairs)",
                f"{here.perplexity:.3f} ({100 * here.pairs:.1f} % of pairs)",
                HOLDS if holds else DIFFERS,
            )


def _windows(text: Texts | None, tokenizer: Any, evaluation: Evaluation) -> SlidingWindows:
    """The windows that were measured: as many from the start as give the recorded number of predicted tokens.

    Raises:
        ValueError: they are not to be had; says why.
    """
    if text is None:
        raise ValueError(_where(evaluation.source, evaluation.revision))
    length = evaluation.context_length
    ids, first = text.token_ids(tokenizer), first_tokens(tokenizer)
    windows = SlidingWindows.of(ids, length, evaluation.stride or length, first)
    if evaluation.tokens is None:
        return windows
    counted = windows.scored.sum(dim=1).cumsum(dim=0)
    count = int((counted <= evaluation.tokens).sum())
    if count == 0 or int(counted[count - 1]) != evaluation.tokens:
        raise ValueError(f"no windows of this text give {evaluation.tokens:,} predicted tokens")
    return windows.first(count)


def check_groups(
    model: nn.Module, tokenizer: Any, report: GroupReport, files: Sequence[str], treebanks: Sequence[str]
) -> Iterator[Claim]:
    """Shares of all groups, and agreement with gold labels, if the text of the report can be had."""

    def found(facts: dict[str, Any]) -> list[str] | None:
        text = read_again({}, str(facts.get("revision")), files)
        return None if text is None else text.documents

    name, besides = report.text.get("name") or "a text", report.text.get("besides")
    of_treebanks = bool(treebanks) and hash_of(treebanks) == report.text.get("revision")
    source: Any = read_treebank(*treebanks) if of_treebanks else found(report.text)
    texts = found(besides) if besides else []
    if source is None or texts is None:
        missing = report.text if source is None else besides or {}
        why = _where({"files": missing.get("name")}, str(missing.get("revision") or ""))
        yield unchecked(f"groups on {name}", f"{len(report.layers)} layers", why)
        return
    window, heads = int(report.text["window"]), len(report.layers)
    here = group_report(model, tokenizer, source, texts=texts, window=window, heads=heads, seed=report.seed)
    yield same("setting of the adapter when its groups were read", report.setting, here.setting)
    for what in ("routed_layers", "attention_layers"):
        yield same(what.replace("_", " "), getattr(report, what), getattr(here, what))
    measured_layers = {layer.name: layer for layer in here.layers}
    for claimed in report.layers:
        if claimed.name not in measured_layers:  # another head attends as far away, to the last digits
            yield unchecked(f"groups of {claimed.name}", f"{len(claimed.groups)} groups", "not among the heads read")
            continue
        measured = measured_layers[claimed.name]
        pairs = zip(claimed.groups, measured.groups, strict=True)
        off = max(abs(one.share - two.share) for one, two in pairs)
        yield at_most(f"shares of the groups of {claimed.name}", off, SHARE)
        yield from _check_names(claimed, measured)
        yield from _check_reading(claimed, measured)
        for kind in claimed.agreement.keys() & measured.agreement.keys():
            one, two = (layer.agreement[kind]["groups"]["nmi"] for layer in (claimed, measured))
            yield close(f"NMI of {claimed.name} with {kind}", float(one), float(two), AGREEMENT)


def _check_names(claimed: LayerFacts, measured: LayerFacts) -> Iterator[Claim]:
    """Names, and how far each can be trusted; a token more or less may tip a name that was close."""
    both = list(zip(claimed.groups, measured.groups, strict=True))
    named = sum(one.name == two.name for one, two in both)
    note = "a name may tip where another fits nearly as well"
    yield close(f"names of the groups of {claimed.name}, same", 1.0, named / len(both), 0.05, "{:.1%}", note)
    alike = [(one, two) for one, two in both if one.name == two.name and one.share > SHARE]
    kinds = ("covers", "chance", "lookup", "contextual")
    off = max((abs(getattr(one, kind) - getattr(two, kind)) for one, two in alike for kind in kinds), default=0.0)
    yield at_most(f"what names fit in {claimed.name}", off, NAME)
    yield close(f"tokens of {claimed.name} by context", claimed.contextual, measured.contextual, SHARE)


def _check_reading(claimed: LayerFacts, measured: LayerFacts) -> Iterator[Claim]:
    """What is read, by group and distance, and what that is worth."""
    for what in ("reads", "attention"):
        one, two = (np.array(getattr(layer, what)) for layer in (claimed, measured))
        off = float(np.abs(one - two).max(initial=0.0)) if one.shape == two.shape else math.inf
        yield at_most(f"{what} of {claimed.name} by group and distance", off, SHARE)
    for what, tolerance in (("silent", SHARE), ("loss", LOSS)):
        one, two = getattr(claimed, what), getattr(measured, what)
        if one is not None and two is not None:
            yield close(f"{what} of {claimed.name}", one, two, tolerance)


def check_balance(model: nn.Module, tokenizer: Any, results: Results, files: Sequence[str]) -> Iterator[Claim]:
    """The largest group of any layer, on the training text."""
    if results.largest_group is None:
        return
    facts, what = results.training, "largest group on the training text"
    source, revision = facts.get("source") or {}, str(facts.get("data revision", ""))
    text = read_again(source, revision, files)
    if text is None:
        where = _where(source or {"files": facts.get("data", "")}, revision)
        yield unchecked(what, f"{results.largest_group:.3f}", where)
        return
    windows = text.windows(tokenizer, int(facts["window"]), int(facts["stride"]))
    sample = calibration_sample(windows, int(facts["calibration windows"]))
    here = max(largest_groups(model, sample.split(4)).values())
    yield close(what, results.largest_group, here, BALANCE, "{:.3f}")


def _where(source: dict[str, Any], revision: str) -> str:
    if source.get("dataset"):
        return f"the data set {source['dataset']} cannot be had at {revision or 'an unknown commit'}"
    files = source.get("files") or "its text"
    return f"needs {files} ({revision or 'of unknown content'}): give it with --text or --treebank"
