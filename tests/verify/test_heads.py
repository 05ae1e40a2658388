"""Claims about an adapter whose heads attend in different ways are measured again, head by head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from focus_hf.adapter.save import save_adapter
from focus_hf.card import FocusModelCard
from focus_hf.evaluate import EvaluationPlan
from focus_hf.evaluate.command import Sources, run_evaluation
from focus_hf.hub import load_adapted
from focus_hf.interpret.command import run_groups
from focus_hf.records.adapter_files import SAMPLE_FILE
from focus_hf.verify import DIFFERS, HOLDS, verify
from tests.interpret.test_heads import adapted


@pytest.fixture(scope="module")
def folder(tiny: Any, tmp_path_factory: Any) -> Path:
    """Measured, with a report and a card."""
    model = adapted(tiny, {"0.0": {"attend": "window"}})
    model.peft_config["default"].base_model_name_or_path = str(tiny / "base")
    out = save_adapter(model, tmp_path_factory.mktemp("heads") / "adapter")
    text = str(tiny / "held_out.txt")
    plan = EvaluationPlan(seq_lens=[128], modes=["dense", "local", "hard"], max_tokens=512)
    with Progress(disable=True) as progress:
        run_evaluation(str(out), Sources((text,)), plan, load=load_adapted, progress=progress, write=True)
        run_groups(str(out), load=load_adapted, progress=progress, texts=[text], window=128, write=True)
    card = FocusModelCard.from_adapter(out, repo_id="me/tiny-focus", base_model="org/base")
    (out / "README.md").write_text(str(card))
    return out


def test_what_was_measured_holds_and_what_was_changed_does_not(folder: Path, tiny: Any) -> None:
    claims = verify(str(folder), texts=[str(tiny / "held_out.txt")])
    assert {claim.verdict for claim in claims} == {HOLDS}, [c for c in claims if c.verdict != HOLDS]
    told = " / ".join(claim.what for claim in claims)
    assert "recorded tokens" in told and "layers.1.self_attn.1" in told and "layers.0.self_attn.0" not in told

    whole = (folder / SAMPLE_FILE).read_text()
    sample = json.loads(whole)
    name = next(name for name in sample["groups"] if name.endswith("1.self_attn.1"))
    sample["groups"][name] = [(group + 1) % 4 for group in sample["groups"][name]]
    (folder / SAMPLE_FILE).write_text(json.dumps(sample))
    try:
        differs = [c.what for c in verify(str(folder)) if c.verdict == DIFFERS]
    finally:
        (folder / SAMPLE_FILE).write_text(whole)
    assert any("recorded tokens" in what for what in differs)
