"""`python -m studies.lora`: Focus and LoRA of one size on the same windows."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from rich.console import Console

from focus_hf.progress import progress_display
from focus_hf.train import TrainRecipe
from studies.lora import compare_with_lora


def _compare(tiny, out, *more):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "studies.lora", "--model", tiny / "base", "--train-file", tiny / "train.txt"),
            *("--eval-file", tiny / "held_out.txt", "--retention-file", tiny / "train.txt", "--output-dir", out),
            *("--num-groups", "4", "--local-window", "8", "--seq-len", "64", "--max-steps", "2"),
            *("--trainer", "use_cpu=true", "--eval-windows", "4", "--json", "-"),
            *("--lora-learning-rate", "2e-3", *more),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return {row["name"]: row for row in json.loads(done.stdout)["rows"]}


@pytest.mark.slow
def test_focus_beside_lora(tiny, tmp_path):
    out = tmp_path / "comparison"
    rows = _compare(tiny, out)
    names = ["base model", "Focus", "window", "Focus", "window", "LoRA"]  # a window beside each row of Focus
    assert [re.split(" of |, ", name)[0] for name in rows] == names
    focus, lora = rows["Focus, top_k=1"], rows["LoRA, rank 5, rate 0.002"]
    assert focus["parameters"] == 2 * (16 * 32 + 4 * 16)
    assert lora["parameters"] == pytest.approx(focus["parameters"], rel=0.12)
    assert rows["base model, dense"]["parameters"] == 0 and lora["domain"] != rows["base model, dense"]["domain"]
    for made in ("focus", "lora"):
        assert (out / made / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_several_ranks_and_rates(tiny, tmp_path):
    more = ("--lora-rank", "1", "--lora-rank", "4", "--lora-learning-rate", "1e-4")
    rows = _compare(tiny, tmp_path / "comparison", *more)
    found = {name: row for name, row in rows.items() if name.startswith("LoRA")}
    assert list(found) == [f"LoRA, rank {rank}, rate {rate}" for rank in (1, 4) for rate in (0.002, 0.0001)]
    assert len({row["domain"] for row in found.values()}) == 4  # each starts from the base model and learns its own
    sizes = [row["parameters"] for row in found.values()]
    assert sizes == [sizes[0], sizes[0], 4 * sizes[0], 4 * sizes[0]]


def test_it_looks_at_its_texts_before_it_trains(tiny, tmp_path):
    (tmp_path / "short.txt").write_text("a b")
    recipe = {
        "model": str(tiny / "base"),
        "train_file": [str(tiny / "train.txt")],
        "output_dir": str(tmp_path / "out"),
    }
    for changes, retention, message in (
        ({}, tiny / "train.txt", "A comparison needs eval_file"),
        ({"eval_file": [str(tiny / "held_out.txt")]}, tmp_path / "short.txt", "fewer than one window"),
    ):
        quiet = progress_display(Console(quiet=True))
        with pytest.raises(ValueError, match=message):
            compare_with_lora(TrainRecipe(**recipe, **changes), retention, [], [2e-3], quiet)
    assert not (tmp_path / "out").exists()
