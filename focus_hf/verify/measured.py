"""Claims that are checked by running the adapter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..evaluate import Mode, SlidingWindows, measure_quality
from ..evaluate.sample import take_sample
from ..interpret import group_report, read_treebank
from ..records import Evaluation, GroupReport, Results
from ..records.sample import TokenSample, same_groups
from ..texts import cut, hash_of, read_again
from ..train.calibration import calibration_sample, largest_groups
from .claims import DIFFERS, HOLDS, Claim, close, unchecked

#: How far a number may be off: other machines and kernels round differently.
SAME_GROUP, PERPLEXITY, SHARE, AGREEMENT, BALANCE = 0.99, 0.005, 0.01, 0.01, 0.01


def check_sample(model: nn.Module, sample: TokenSample | None) -> Iterator[Claim]:
    """The groups of the recorded tokens."""
    if sample is None:
        yield unchecked("groups of a recorded sample", "", "none was recorded")
        return
    here = same_groups(sample, take_sample(model, torch.tensor(sample.ids)))
    yield close(
        f"groups of {len(sample.ids)} recorded tokens, same",
        1.0,
        here,
        1 - SAME_GROUP,
        "{:.1%}",
        note=f"at least {SAME_GROUP:.0%}",
    )


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
        if text is None:
            yield unchecked(name, len(evaluation.rows), _where(evaluation.source, evaluation.revision))
            continue
        try:
            windows = _windows(text.token_ids(tokenizer), evaluation)
        except ValueError as error:
            yield unchecked(name, len(evaluation.rows), str(error))
            continue
        for row in evaluation.rows:
            mode = Mode.of(row)
            (here,) = measure_quality(model, windows, [mode])
            tick(f"{name}: {here}")
            claimed = float(row["perplexity"])
            what = f"{name}: {mode}"
            pairs = float(row["pairs"])
            holds = abs(here.perplexity - claimed) <= PERPLEXITY * claimed and abs(here.pairs - pairs) <= SHARE
            yield Claim(
                what,
                f"{claimed:.3f} ({100 * pairs:.1f} % of pairs)",
                f"{here.perplexity:.3f} ({100 * here.pairs:.1f} % of pairs)",
                HOLDS if holds else DIFFERS,
            )


def _windows(ids: torch.Tensor, evaluation: Evaluation) -> SlidingWindows:
    """The windows that were measured: as many from the start as give the recorded number of predicted tokens."""
    windows = SlidingWindows.of(ids, evaluation.context_length, evaluation.stride or evaluation.context_length)
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
    name, revision = str(report.text.get("name") or "a text"), str(report.text.get("revision") or "")
    source: Any = None
    if treebanks and hash_of(treebanks) == revision:
        source = read_treebank(*treebanks)
    elif (text := read_again({}, revision, files)) is not None:
        source = text.documents
    if source is None:
        yield unchecked(f"groups on {name}", f"{len(report.layers)} layers", _where({"files": name}, revision))
        return
    here = group_report(
        model, tokenizer, source, name=name, revision=revision, window=int(report.text["window"]), seed=report.seed
    )
    measured_layers = {layer.name: layer for layer in here.layers}
    for claimed in report.layers:
        if claimed.name not in measured_layers:  # another head attends as far away, to the last digits
            yield unchecked(f"groups of {claimed.name}", f"{len(claimed.groups)} groups", "not among the heads read")
            continue
        measured = measured_layers[claimed.name]
        pairs = zip(claimed.groups, measured.groups, strict=True)
        off = max(abs(one.share - two.share) for one, two in pairs)
        yield close(f"shares of the groups of {claimed.name}, off by", 0.0, off, SHARE, "{:.4f}")
        for kind in claimed.agreement.keys() & measured.agreement.keys():
            one, two = (layer.agreement[kind]["groups"]["nmi"] for layer in (claimed, measured))
            yield close(f"NMI of {claimed.name} with {kind}", float(one), float(two), AGREEMENT, "{:.4f}")


def check_balance(model: nn.Module, tokenizer: Any, results: Results, files: Sequence[str]) -> Iterator[Claim]:
    """The largest group of any layer, on the training text."""
    if results.largest_group is None:
        return
    facts = results.training
    what = "largest group on the training text"
    text = read_again(facts.get("source") or {}, str(facts.get("data revision", "")), files)
    if text is None:
        where = _where(facts.get("source") or {"files": facts.get("data", "")}, str(facts.get("data revision", "")))
        yield unchecked(what, f"{results.largest_group:.3f}", where)
        return
    windows = cut(text.token_ids(tokenizer), int(facts["window"]), int(facts["stride"]))
    sample = calibration_sample(windows, int(facts["calibration windows"]))
    here = max(largest_groups(model, sample.split(4)).values())
    yield close(what, results.largest_group, here, BALANCE, "{:.3f}")


def _where(source: dict[str, Any], revision: str) -> str:
    if source.get("dataset"):
        return f"the data set {source['dataset']} cannot be had at {revision or 'an unknown commit'}"
    files = source.get("files") or "its text"
    return f"needs {files} ({revision or 'of unknown content'}): give it with --text or --treebank"
