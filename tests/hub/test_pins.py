"""Base model and tokenizer are pinned by their commits."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from huggingface_hub import HfApi

from focus_hf.commits import commit_of
from focus_hf.local_hub import LocalHub

TRAIN = """
import sys
from focus_hf.card import write_card
from focus_hf.train import TrainRecipe, train
train(TrainRecipe(model="demo/base", output_dir=sys.argv[1], train_file=[sys.argv[2]], num_groups=4, local_window=8,
                  seq_len=64, max_steps=1, batch_size=1, eval_windows=2, calibration_windows=2,
                  trainer={"disable_tqdm": True}), on_saved=write_card)
"""

LOAD = """
import sys, warnings
import focus_hf
from transformers import AutoModelForCausalLM
from focus_hf.hub import load_adapted
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    if sys.argv[2] == "ours":
        model, tokenizer, _ = load_adapted(sys.argv[1])
    else:
        model = AutoModelForCausalLM.from_pretrained("demo/base")
        model.load_adapter(sys.argv[1])
for warning in caught:
    if "was trained on" in str(warning.message):
        print("WARNED", warning.message)
print("WEIGHT", float(model.model.norm.weight[0]))
"""


def run(code, hub, home, *arguments):
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow  # four processes
def test_another_base_model_in_the_place_of_the_pinned_one(tiny, tmp_path):
    with LocalHub(tmp_path / "hub", token="t") as hub:
        api = HfApi(endpoint=hub.endpoint, token="t")
        api.create_repo("demo/base")
        api.upload_folder(folder_path=tiny / "base", repo_id="demo/base")
        pinned = api.model_info("demo/base").sha
        run(TRAIN, hub, tmp_path / "author", tmp_path / "adapter", tiny / "train.txt")
        config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        assert config["revision"] == config["tokenizer_revision"] == pinned
        assert pinned in (tmp_path / "adapter" / "README.md").read_text()
        same = run(LOAD, hub, tmp_path / "same", tmp_path / "adapter", "stock")
        assert "WARNED" not in same

        # Somebody pushes other weights to the base model's main branch.
        import torch
        from safetensors.torch import load_file, save_file

        tensors = load_file(tiny / "base" / "model.safetensors")
        tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], 7.0)
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        api.upload_file(
            path_or_fileobj=tmp_path / "model.safetensors", path_in_repo="model.safetensors", repo_id="demo/base"
        )
        moved = api.model_info("demo/base").sha
        stock = run(LOAD, hub, tmp_path / "visitor", tmp_path / "adapter", "stock")
        assert "WEIGHT 7.0" in stock and "WARNED" in stock
        assert f"at commit {pinned[:12]}" in stock and f"at commit {moved[:12]}" in stock
        ours = run(LOAD, hub, tmp_path / "visitor", tmp_path / "adapter", "ours")
        assert "WEIGHT 7.0" not in ours and "WARNED" not in ours  # our own commands load what is pinned


def test_a_folder_has_no_commit_and_a_hub_out_of_reach_none_either(tmp_path):
    assert commit_of(str(tmp_path)) is None
    assert commit_of("demo/never-seen") is None  # the tests' endpoint refuses
    assert commit_of("demo/x", "a" * 40) == "a" * 40
