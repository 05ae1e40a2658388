"""Verify an adapter: every claim of its card that can be checked here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from ..hub import adapter_folder, load_adapted
from ..records import GroupReport, TokenSample, load_results
from .claims import Claim, unchecked
from .files import check_files
from .measured import check_balance, check_groups, check_perplexities, check_sample


def verify(
    adapter: str,
    *,
    texts: Sequence[str] = (),
    treebanks: Sequence[str] = (),
    base: str | None = None,
    revision: str | None = None,
    device: str = "cpu",
    device_map: str | None = None,
    dtype: str = "auto",
    files_only: bool = False,
    lengths: Collection[int] | None = None,
    tick: Callable[[str], None] = lambda done: None,
) -> list[Claim]:
    """Measure a card's claims again.

    Texts are found by themselves where they are data sets on the Hub; files must be given, and are known by their
    content.

    Args:
        adapter: folder or Hub id.
        texts: text files that may be those the card names.
        treebanks: ``.conllu`` files of its group report.
        base: base model, if not the one that the adapter names.
        revision: of the adapter on the Hub.
        device, device_map, dtype: where to run, see `load_adapted`. In another dtype than they were measured in,
            figures may differ by more than is tolerated.
        files_only: check what needs no model.
        lengths: context lengths at which perplexity is measured; by default all that the card has.
        tick: told what is done.

    Returns:
        All claims in the order of the card; see `focus_hf.verify.claims.all_hold`.

    Raises:
        AdapterFileError: it is not a sound Focus adapter.
        HubError: the Hub refused or was not reached.
        ValueError: the base model is not to be had, or the card has nothing at one of the lengths.
    """
    folder = adapter_folder(adapter, revision=revision)
    results = load_results(folder)
    measured = {evaluation.context_length for evaluation in (results.evaluations if results else ())}
    if missing := sorted(set(lengths or ()) - measured):
        there = ", ".join(str(length) for length in sorted(measured)) or "no length at all"
        raise ValueError(f"The card has no perplexity at {missing[0]} tokens, but at {there}.")
    claims = list(check_files(folder))
    tick("files")
    if files_only:
        return claims
    model, tokenizer, _ = load_adapted(str(folder), base=base, device=device, device_map=device_map, dtype=dtype)
    tick("model loaded")
    claims += check_sample(model, TokenSample.load(folder))
    if results is not None:
        claims += check_perplexities(model, tokenizer, results, texts, tick, lengths)
        claims += check_balance(model, tokenizer, results, texts)
        tasks = ", ".join(dict.fromkeys(str(row["task"]) for row in results.benchmarks))
        left = (
            ("speed", "", f"depends on the machine: focus-hf bench --adapter {adapter}", results.speed),
            ("retrieval", "", "focus-hf eval --retrieval measures it again", results.retrieval),
            ("RULER", "", _ruler_again(adapter, results.ruler) if results.ruler else "", results.ruler),
            ("tasks on code", "", "focus-hf eval --code measures them again", results.code),
            ("benchmarks", tasks, f"focus-hf eval --tasks {tasks} measures them again", results.benchmarks),
        )
        claims += [unchecked(what, claimed, why) for what, claimed, why, is_there in left if is_there]
    if (report := GroupReport.load(folder)) is not None:
        tick("groups")
        claims += check_groups(model, tokenizer, report, texts, treebanks)
    return claims


def _ruler_again(adapter: str, rows: Sequence[dict[str, Any]]) -> str:
    """The command that measures these rows again; their prompts need no text."""
    lengths, tasks = (",".join(dict.fromkeys(str(row[name]) for row in rows)) for name in ("length", "task"))
    last, share = rows[0].get("question_tokens"), rows[0].get("question_pairs")
    asked = f" --ruler-question {last} --ruler-question-pairs {share:g}" if last else ""
    return (
        f"focus-hf eval --adapter {adapter} --ruler {lengths} --ruler-tasks {tasks} "
        f"--ruler-samples {rows[0]['samples']} --seed {rows[0]['seed']}{asked} measures it again"
    )
