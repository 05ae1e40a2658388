"""``--device-map`` and ``--dtype``: where base models go, said in one place for all commands."""

from __future__ import annotations

import sys

import pytest
import torch
import typer

from focus_hf.adapter.save import save_adapter
from focus_hf.cli import app, main
from focus_hf.hub import load_adapted
from focus_hf.placement import check_placement, load_base
from focus_hf.train import TrainRecipe, train
from tests.families import base_model, focus_model, logits, token_ids

LOADING = {"eval", "groups", "explore", "verify", "bench", "train", "fit"}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"dtype": "int8"}, "dtype must be one of auto, float32, bfloat16, float16, got 'int8'."),
        ({"device": "abacus"}, "device 'abacus' cannot be used here"),
        (
            {"device_map": "sideways"},
            "device_map must be one of auto, balanced, balanced_low_0, sequential, or a device, as cpu or cuda:0; "
            "got 'sideways'.",
        ),
        ({"device_map": "cuda:99"}, "device 'cuda:99' cannot be used here"),
    ],
)
def test_bad_values_give_one_line(asked, message):
    with pytest.raises(ValueError) as raised:
        check_placement(**asked)
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)
    with pytest.raises(ValueError):
        load_base("there is no such model", **asked)  # said before it is looked for


@pytest.mark.parametrize("asked", [{"device_map": "auto"}, {"device_map": "cpu"}, {"dtype": "bfloat16"}])
def test_an_adapted_model_goes_where_it_is_asked_to(tiny, tmp_path, asked):
    model = focus_model("llama")
    folder = save_adapter(model, tmp_path / "adapter")
    base_model("llama").save_pretrained(tmp_path / "base")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "base" / name).write_text((tiny / "base" / name).read_text())
    plain, _, _ = load_adapted(str(folder), base=str(tmp_path / "base"))
    placed, _, _ = load_adapted(str(folder), base=str(tmp_path / "base"), **asked)
    ours, its = (m.lm_head.weight.cpu() for m in (placed, plain))
    assert its.dtype == torch.float32 and torch.equal(ours, its.to(getattr(torch, asked.get("dtype", "float32"))))
    if "dtype" not in asked:
        ours, its = (logits(m, token_ids().to(m.device)).cpu() for m in (placed, plain))
        torch.testing.assert_close(ours, its, rtol=1e-4, atol=1e-4)


def test_a_recipe_places_its_model(tiny, tmp_path):
    files = {"model": str(tiny / "base"), "train_file": [str(tiny / "train.txt")], "output_dir": str(tmp_path / "out")}
    values = {**files, "num_groups": 4, "local_window": 8, "seq_len": 64, "max_steps": 1, "eval_windows": 2}
    recipe = TrainRecipe(**values, device_map="auto", dtype="bfloat16", trainer={"disable_tqdm": True})
    result = train(recipe)
    assert (result.folder / "adapter_model.safetensors").is_file()
    with pytest.raises(ValueError, match="dtype bfloat16 is too coarse for weights that learn"):
        TrainRecipe(**values, weights="trained", dtype="bfloat16")
    with pytest.raises(ValueError, match="dtype must be one of auto"):
        train(TrainRecipe(**values, dtype="int8", overwrite=True))


def test_several_processes_refuse_a_device_map(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    recipe = TrainRecipe(
        model=str(tiny / "base"), train_file=[str(tiny / "train.txt")], output_dir=str(tmp_path), device_map="auto"
    )
    with pytest.raises(ValueError, match="device_map='auto' spreads the model of one process, and there are several"):
        train(recipe)


def test_every_command_that_loads_a_model_has_the_flags():
    commands = typer.main.get_command(app).commands
    having = {
        name
        for name, command in commands.items()
        if {"--device-map", "--dtype"} <= {option for parameter in command.params for option in parameter.opts}
    }
    assert having == LOADING


def test_a_missing_accelerate_is_named_with_its_extra(monkeypatch, capsys):
    """PEFT brings it; who took it away is told what to do."""
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.setattr(sys, "argv", ["focus-hf", "verify", "nobody/nothing", "--device-map", "auto"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    assert capsys.readouterr().err.strip() == "focus-hf: This needs accelerate: pip install 'focus-hf[train]'"
