"""Claims about an adapter whose heads read cells are measured again, head by head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from focus_hf.adapter.save import save_adapter
from focus_hf.card import FocusModelCard
from focus_hf.card.figures import DIAL, dial_figure
from focus_hf.evaluate import EvaluationPlan
from focus_hf.evaluate.command import run_evaluation
from focus_hf.hub import load_adapted
from focus_hf.interpret.command import run_groups
from focus_hf.records import load_results
from focus_hf.records.adapter_files import GROUPS_FILE, SAMPLE_FILE
from focus_hf.texts import TextSource
from focus_hf.verify import DIFFERS, HOLDS, verify
from focus_hf.verify.claims import Claim, verdict_of
from tests.interpret.test_heads import adapted


@pytest.fixture(scope="module")
def folder(tiny: Any, tmp_path_factory: Any) -> Path:
    """Measured, with a report, pictures and a card."""
    model = adapted(tiny)
    model.peft_config["default"].base_model_name_or_path = str(tiny / "base")
    out = save_adapter(model, tmp_path_factory.mktemp("heads") / "adapter")
    text = str(tiny / "held_out.txt")
    plan = EvaluationPlan(seq_lens=[128], modes=["dense", "local", "hard", "window"], max_tokens=512)
    with Progress(disable=True) as progress:
        run_evaluation(str(out), [TextSource((text,))], plan, load=load_adapted, progress=progress, write=True)
        run_groups(str(out), load=load_adapted, progress=progress, texts=[text], window=128, write=True)
    results = load_results(out)
    assert results is not None and dial_figure(results, out) == out / DIAL
    card = FocusModelCard.from_adapter(out, repo_id="me/tiny-focus", base_model="org/base")
    (out / "README.md").write_text(str(card))
    return out


def differing(folder: Path, file: str, change: Any, **options: Any) -> list[str]:
    """What differs when one of the records says something else."""
    whole = (folder / file).read_text()
    values = json.loads(whole)
    change(values)
    (folder / file).write_text(json.dumps(values))
    try:
        return [claim.what for claim in verify(str(folder), **options) if claim.verdict == DIFFERS]
    finally:
        (folder / file).write_text(whole)


def test_what_was_measured_holds_and_what_was_changed_does_not(folder: Path, tiny: Any) -> None:
    texts = [str(tiny / "held_out.txt")]
    claims = verify(str(folder), texts=texts)
    assert {claim.verdict for claim in claims} == {HOLDS}, [c for c in claims if c.verdict != HOLDS]
    told = " / ".join(claim.what for claim in claims)
    for part in (
        "recorded tokens, same",
        "recorded tokens read",
        "layers.1.self_attn.1",
        "loss of",
        "silent of",
        "pictures",
    ):
        assert part in told, part

    name = next(iter(json.loads((folder / SAMPLE_FILE).read_text())["groups"]))

    def other_groups(sample: dict[str, Any]) -> None:
        sample["groups"][name] = [(group + 1) % 4 for group in sample["groups"][name]]
        sample["reads"][name] = [2 * count + 1 for count in sample["reads"][name]]

    found = differing(folder, SAMPLE_FILE, other_groups)
    assert any("tokens, same" in what for what in found) and "cells that the recorded tokens read" in found

    def lies(report: dict[str, Any]) -> None:
        layer = report["layers"][0]
        layer["loss"] += 0.1
        layer["silent"] = 1 - layer["silent"]
        layer["attention"][0][0] += 0.1
        layer["groups"][0]["name"] = "names"
        layer["groups"][1]["covers"] = 1 - layer["groups"][1]["covers"] / 2

    found = differing(folder, GROUPS_FILE, lies, texts=texts)
    for part in ("loss of", "silent of", "attention of", "names of the groups", "what names fit", "section groups"):
        assert any(part in what for what in found), part
    assert any(what.startswith("figures/head-") for what in found)


def test_only_a_card_that_is_there_and_was_checked_holds() -> None:
    holds, differs, left = (Claim("x", "1", "1", verdict) for verdict in (HOLDS, DIFFERS, "not checked"))
    assert verdict_of([holds], has_card=True) == "The card holds."
    assert "The card holds" not in verdict_of([holds], has_card=False)
    assert verdict_of([holds, left], has_card=True) == "The card holds in what was checked; 1 claims were not."
    assert verdict_of([holds, differs], has_card=True) == "1 of 2 claims do not hold."
