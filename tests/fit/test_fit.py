"""A whole fit: planted structure is found, and what comes out is an adapter like any other."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import focus_hf
from focus_hf.adapter import focus_layers
from focus_hf.cli import app
from focus_hf.evaluate.leave import take_sample
from focus_hf.evaluate.perplexity import attended_share
from focus_hf.fit import FitRecipe, fit
from focus_hf.fit.dial import afterwards, dial, per_cent
from focus_hf.fit.estimate import duration
from focus_hf.fit.importance import LayerWindow
from focus_hf.fit.layer import fit_layer
from focus_hf.fit.lookups import lookups
from focus_hf.fit.windows import spread_windows, windows_of
from focus_hf.records import TokenSample, check_adapter, load_results, save_results
from focus_hf.records.sample import same_groups
from focus_hf.texts import Texts
from tests.families import token_ids

TOPICS, LENGTH = 8, 256


def recipe(tiny, out, **changes):
    values = {
        "model": str(tiny / "base"),
        "train_file": [str(tiny / "train.txt")],
        "output_dir": str(out),
        "seq_len": 128,
        "windows": 4,
        "dial_windows": 2,
        "rows": 64,
        "num_groups": 4,
        "group_dim": 4,
        "local_window": 8,
        "sink_tokens": 2,
        "num_bands": 3,
        "steps": 20,
        "pairs": 0.5,
    }
    return FitRecipe(**{**values, **changes})


@pytest.fixture(scope="module")
def fitted(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("fit") / "adapter"
    said = []
    result = fit(recipe(tiny, out, base_model="org/base"), say=said.append)
    return result, said


def copying_window(seed: int) -> LayerWindow:
    """Two heads. The first copies: its queries attend to the keys of their own topic, wherever these are, and what is
    there matters. To the second one only the last few tokens matter."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    topic, wanted = (torch.randperm(LENGTH, generator=generator) % TOPICS for _ in range(2))
    one_hot = torch.eye(TOPICS)
    keys = torch.stack([5 * one_hot[topic], 0.02 * normal(LENGTH, TOPICS)])
    queries = torch.stack([5 * one_hot[wanted], 0.02 * normal(LENGTH, TOPICS)])
    values = normal(2, LENGTH, 6)
    values[1] *= 0.01
    return LayerWindow(keys, keys, values, torch.arange(LENGTH), queries, normal(2, LENGTH, 6), scale=0.5)


def one_key_head(seed: int) -> LayerWindow:
    """The same query heads over the keys of the first: to the second nothing matters."""
    window = copying_window(seed)
    gradients = window.gradients * torch.tensor([1.0, 0.01])[:, None, None]
    return replace(
        window, keys=window.keys[:1], plain_keys=window.keys[:1], values=window.values[:1], gradients=gradients
    )


@pytest.mark.parametrize("window", [copying_window, one_key_head])
def test_a_head_that_copies_is_found_and_gets_the_pairs(window):
    settings = FitRecipe(
        model="m",
        output_dir="o",
        num_groups=TOPICS,
        group_dim=8,
        local_window=8,
        num_bands=5,
        steps=300,
        seq_len=LENGTH,
        each_query_head=window is one_key_head,
    )
    layer = fit_layer(window, range(6), range(10, 13), settings, seed=0)
    copying = replace(
        layer.curves, **{name: getattr(layer.curves, name)[:1] for name in ("loss", "pairs", "window_loss")}
    )
    (point,) = dial(copying, LENGTH, (0.25,))
    assert point.loss < 0.05 * point.window_loss
    loss = layer.curves.before(LENGTH).loss[:, 0]
    assert float(loss[1].max()) < 1e-3 * float(loss[0].max())


def test_the_dial_is_monotone_and_better_than_a_window_at_what_it_tells(fitted):
    result, said = fitted
    assert result.layers == (2, 2) and list(result.dial) == [128]
    points = result.dial[128]
    assert [point.pairs for point in points] == sorted(point.pairs for point in points) and len(points) >= 3
    assert [point.threshold for point in points] == sorted((point.threshold for point in points), reverse=True)
    assert all(point.loss >= 0 and point.window_loss >= 0 for point in points)
    assert said[0] == "reading text" and "of memory" in said[1] and "of scratch" in said[1]


def test_pairs_are_what_was_asked_for(fitted, tiny):
    """Counted by the adapter itself, on windows of the same text."""
    result, _ = fitted
    texts = [source.load() for source in recipe(tiny, "o").sources()]
    windows = torch.stack(spread_windows(texts, AutoTokenizer.from_pretrained(tiny / "base"), [128] * 8, seed=1))
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny / "base"), result.folder).eval()
    assert attended_share(model, windows) == pytest.approx(0.5, abs=0.05)  # as the recipe says
    for share in (0.35, 0.8, 1.0):
        focus_hf.set_routing(model, pairs=share)
        assert attended_share(model, windows) == pytest.approx(share, abs=0.05)
    focus_hf.set_routing(model, threshold=result.dial[128][0].threshold)
    assert attended_share(model, windows) == pytest.approx(result.dial[128][0].pairs, abs=0.05)


def test_every_stock_loader_gives_the_same_logits(fitted, tiny):
    folder, ids = fitted[0].folder, token_ids(2, 96)
    check_adapter(folder)
    base = AutoModelForCausalLM.from_pretrained(tiny / "base")
    loaded = AutoModelForCausalLM.from_pretrained(tiny / "base")
    loaded.load_adapter(str(folder))
    models = [
        loaded,
        AutoModelForCausalLM.from_pretrained(folder),
        AutoPeftModelForCausalLM.from_pretrained(folder),
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny / "base"), folder),
    ]
    with torch.no_grad():
        dense = base(ids).logits
        found = [model.eval()(ids).logits for model in models]
        shortest = min(layer.routing_config.local_window for layer in focus_layers(loaded))
        for model in models:
            assert torch.equal(model(ids[:, : shortest + 1]).logits, base(ids[:, : shortest + 1]).logits)
    assert all(torch.equal(one, found[0]) for one in found)
    assert (found[0] - dense).abs().max() > 1e-4


def test_saving_again_changes_nothing(fitted, tiny, tmp_path):
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny / "base"), fitted[0].folder)
    model.save_pretrained(tmp_path)
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (fitted[0].folder, tmp_path))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    configs = [json.loads((folder / "adapter_config.json").read_text()) for folder in (fitted[0].folder, tmp_path)]
    assert all(configs[0][name] == configs[1][name] for name in ("pairs_curves", "threshold", "routing", "num_bands"))


def test_groups_of_the_adapter_are_those_that_were_recorded(fitted, tiny):
    folder = fitted[0].folder
    tensors = load_file(folder / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny / "base"), folder).eval()
    sample = TokenSample.load(folder)
    assert same_groups(sample, take_sample(model, torch.tensor(sample.ids))) == 1.0


def test_fitted_layers_are_used_again(tiny, tmp_path, monkeypatch):
    out = tmp_path / "adapter"
    first = fit(recipe(tiny, out))
    (out / "fit" / "1.safetensors").write_bytes(b"cut short")
    with pytest.raises(ValueError, match="already holds an adapter"):
        fit(recipe(tiny, out))
    said = []
    again = fit(recipe(tiny, out, resume=True, scratch_gb=1e-6), say=said.append)
    assert said[1] == "1 of 2 layers are fitted already"
    for one, other in zip(first.dial[128], again.dial[128], strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-3)
    monkeypatch.setattr("focus_hf.fit.run.capture", None)  # nothing is captured any more
    was = load_results(out).training["seconds"]
    save_results(replace(load_results(out), training={**load_results(out).training, "seconds": was + 1000}), out)
    fit(recipe(tiny, out, resume=True, pairs=0.3))
    assert load_results(out).training["seconds"] >= was + 1000  # what the layers took counts
    assert json.loads((out / "adapter_config.json").read_text())["pairs"] == 0.3
    monkeypatch.undo()
    said.clear()
    fit(recipe(tiny, out, resume=True, steps=3), say=said.append)
    assert said[1] == "0 of 2 layers are fitted already"


def test_an_interrupted_fit_keeps_its_layers(tiny, tmp_path, monkeypatch):
    out, done = tmp_path / "adapter", []

    def interrupted(*args):
        if done:
            raise KeyboardInterrupt
        done.append(1)
        return fit_layer(*args)

    monkeypatch.setattr("focus_hf.fit.run.fit_layer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(recipe(tiny, out))
    monkeypatch.undo()
    with pytest.raises(ValueError, match="holds fitted layers: pass --resume"):
        fit(recipe(tiny, out))
    said = []
    fit(recipe(tiny, out, resume=True), say=said.append)
    assert said[1] == "1 of 2 layers are fitted already"


def test_windows_of_several_lengths(tiny, tmp_path):
    result = fit(recipe(tiny, tmp_path / "a", seq_len=[128, 256], windows=[3, 2], dial_windows=[2, 1]))
    assert list(result.dial) == [256]
    facts = load_results(result.folder).training
    assert facts["windows"] == "3 of 128 tokens and 2 of 256 tokens"
    assert facts["windows for the dial"] == "2 of 128 tokens and 1 of 256 tokens"
    assert facts["data"] == "train.txt" and facts["data revision"].startswith("sha256:")
    with pytest.raises(ValueError, match="seq_len names 3 lengths and windows 2 numbers of windows"):
        recipe(tiny, tmp_path / "a", seq_len=[128, 192, 256], windows=[3, 2])


@pytest.mark.parametrize(
    ("given", "positions", "lengths", "windows", "dial_windows"),
    [
        ({}, None, [2048, 8192], [24, 5], [8, 1]),
        ({}, 131_072, [2048, 8192], [24, 5], [8, 1]),
        ({}, 4096, [2048, 4096], [24, 5], [8, 1]),
        ({}, 2048, [2048], [24], [8]),
        ({}, 1024, [1024], [24], [8]),
        ({"windows": 8}, 8192, [2048, 8192], [8, 2], [2, 1]),
        ({"windows": 2}, 8192, [2048, 8192], [2, 1], [1, 1]),
        ({"seq_len": 16_384}, 32_768, [16_384], [24], [8]),
        ({"seq_len": [512, 4096], "windows": [9, 3], "dial_windows": 5}, 512, [512, 4096], [9, 3], [5, 1]),
    ],
)
def test_lengths_and_numbers_by_default(given, positions, lengths, windows, dial_windows):
    found = FitRecipe(model="m", output_dir="o", **given).for_model(positions)
    assert (found.seq_len, found.windows, found.dial_windows) == (lengths, windows, dial_windows)


def test_a_fit_without_lengths_reaches_as_far_as_the_model(tiny, tmp_path):
    result = fit(recipe(tiny, tmp_path / "a", seq_len=[], windows=2, dial_windows=1))
    assert load_results(result.folder).training["windows"] == "2 of 512 tokens"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pairs": 0.0}, "above 0 and at most 1; got 0.0"),
        ({"seq_len": 16}, "leaves next to nothing beyond local_window"),
        ({"windows": 0}, "windows must be an integer of at least 1"),
        ({"steps": 1}, "steps must be an integer of at least 2"),
        ({"num_groups": 0}, "num_groups must be an integer from 1"),
        ({"num_groups": 500}, "num_groups"),
        ({"train_file": []}, "Give either text files"),
        ({"seq_len": 1024}, "seq_len is 1024, but the model has 512 positions"),
        ({"windows": 5000}, "train.txt is too short for"),
        ({"scratch_dir": "/nowhere/at/all"}, "scratch_dir /nowhere/at/all is no folder"),
        ({"num_groups": 200, "windows": 1, "seq_len": 64, "rows": 64}, "64 points cannot make 200 groups"),
    ],
)
def test_bad_input_is_told_in_one_line(tiny, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        fit(recipe(tiny, tmp_path / "a", **changes))


def test_a_folder_that_cannot_be_written_to_is_told_before_anything_is_read(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; name a folder"):
        fit(recipe(tiny, tmp_path / "file", model="nowhere"))
    with pytest.raises(ValueError, match=r"cannot be written to \(Not a directory\): name another"):
        fit(recipe(tiny, tmp_path / "file" / "below", model="nowhere"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tiny, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match="cannot be written to"):
        fit(recipe(tiny, tmp_path / "below", model="nowhere"))


def test_a_full_disk_is_told_before_hours_of_work(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: os.statvfs_result and type("Usage", (), {"free": 1000}))
    with pytest.raises(ValueError, match="GB free, and captured tensors take .* in more passes"):
        fit(recipe(tiny, tmp_path / "a"))


def test_windows_come_from_all_texts_alike_and_do_not_overlap():
    class Letters:
        def __call__(self, text, **_):
            return {"input_ids": [ord(letter) for letter in text]}

    texts = [Texts(["".join(chr(1000 * n + i) for i in range(900))], f"text {n}") for n in (1, 2)]
    windows = spread_windows(texts, Letters(), [100] * 5 + [200] * 2, seed=0)
    assert [len(window) for window in windows] == [100] * 5 + [200] * 2
    assert [int(window[0]) // 1000 for window in windows] == [1, 2, 1, 2, 1, 2, 1]
    every = torch.cat(windows)
    assert len(every.unique()) == len(every)


def test_one_window_in_eight_is_of_made_up_lookups(tiny):
    """... of those to fit to, whatever their length; the dial is measured on text."""
    two = {"seq_len": [128, 256], "dial_windows": [2, 1]}
    tokenizer = AutoTokenizer.from_pretrained(tiny / "base")
    for windows, every, expected in (
        ([18, 2], 8, [3, 11, 19]),
        ([18, 2], 10, [4, 14]),
        ([2, 1], 1, [0, 1, 2]),
        ([3, 1], 8, [3]),
        ([2, 1], 8, []),
        ([18, 2], 0, []),
    ):
        asked = recipe(tiny, "o", **two, windows=windows, lookups=every)
        texts = [source.load() for source in asked.sources()]
        found = windows_of(asked, texts, tokenizer)
        assert [len(ids) for _, ids in found] == asked.lengths
        assert [n for n, (text, _) in enumerate(found) if text is not texts[0]] == expected == asked.lookup_windows
    with pytest.raises(ValueError, match="lookups"):
        recipe(tiny, "o", lookups=-1)


def test_lookups_are_told_and_said_again():
    line = "A line of ordinary text that stands between others."
    (text,) = lookups([Texts([f"short\n{line}\n", 200 * "x"], "text")], 20_000, seed=0).documents
    lines = text.split("\n")
    assert len(lines) == 20_000 and {line, 160 * "x"} < set(lines) and "short" not in lines
    made_up = [each.replace(" is ", " ") for each in lines if each not in (line, 160 * "x")]
    told = [tuple(re.findall(r"\w+", each)[-2:]) for each in made_up]
    assert 13_500 < len(told) < 14_500 and 6_000 < len(set(told)) < 6_600
    value_of = {}
    assert all(value_of.setdefault(name, value) == value for name, value in told), "a name has one value"
    assert {value for _, value in told} & value_of.keys(), "and may be one itself"
    assert lookups([], 50, seed=1) != lookups([], 50, seed=2)
    assert lookups([], 50, seed=1) == lookups([], 50, seed=1)


def test_the_words_at_the_end(fitted):
    result, _ = fitted
    (said,) = afterwards(result.dial, 0.5, (2, 2))
    assert said.startswith("At 128 tokens, with 50% of the pairs, it loses about ") and "a window" in said
    assert "Only 2 of the model's 26 layers" in afterwards(result.dial, 0.5, (2, 26))[1]
    assert [per_cent(loss) for loss in (0.01, 0.2, 5.0)] == ["1.0 %", "22 %", "more than 900 %"]
    assert [duration(seconds) for seconds in (3, 600, 7200)] == ["10 seconds", "10 minutes", "2.0 hours"]


def test_the_command(tiny, tmp_path):
    flags = ["--model", tiny / "base", "--train-file", tiny / "train.txt", "--seq-len", 128, "--windows", 2]
    flags += ["--num-groups", 4, "--local-window", 8, "--seed", 1, "--steps", 10, "--pairs", 0.5]
    done = CliRunner().invoke(app, ["fit", *map(str, [*flags, "--output-dir", tmp_path / "a", "--json"])])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert answer["layers"] == {"routed": 2, "all": 2} and answer["dial"]["128"][0]["window_loss"] > 0
    done = CliRunner().invoke(app, ["fit", *map(str, [*flags, "--output-dir", tmp_path / "b"])])
    assert (
        done.exit_code == 0 and "turns the dial" in done.output and "of perplexity by its own estimate" in done.output
    )
    one, other = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("a", "b"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_its_speed_is_measured_on_a_text_at_shares(fitted, tiny, tmp_path):
    result, _ = fitted
    folder = shutil.copytree(result.folder, tmp_path / "a")
    flags = ["--what", "model", "--adapter", folder, "--base", tiny / "base", "--text", tiny / "held_out.txt"]
    bench = ["bench", *map(str, [*flags, "--lengths", "64,128", "--write", "--pairs"])]
    done = CliRunner().invoke(app, [*bench, "0.9,0.5"])
    assert done.exit_code == 0, done.output
    speed = load_results(folder).speed
    assert [(row["what"], row["length"], row["pairs"]) for row in speed] == [
        (what, length, share) for length, share in ((64, 0.9), (128, 0.5)) for what in ("prefill", "generate")
    ]
    assert all(row["dense_ms"] > 0 and row["focus_ms"] > 0 for row in speed)
    for wrong, said in (("1,1,1", "2 settings and 3 shares"), ("2", "above 0 and at most 1"), ("x", "got 'x'")):
        assert said in str(CliRunner().invoke(app, [*bench, wrong]).exception)
    without = CliRunner().invoke(app, ["bench", "--pairs", "0.5"]).exception
    assert "--pairs is the dial of an adapter" in str(without)
    for wrong, said in (
        (["--engine", "vllm"], "for --what serving"),
        (["--what", "serving", "--engine", "x"], "one of transformers, vllm"),
        (["--what", "serving", "--engine", "vllm"], "give --adapter"),
    ):
        assert said in str(CliRunner().invoke(app, ["bench", *wrong]).exception)
