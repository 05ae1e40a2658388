"""`train` from text to adapter: what it leaves, what it refuses, and that interrupting it changes nothing."""

from __future__ import annotations

import json
import resource
import signal
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

import focus_hf
from focus_hf.card import write_card
from focus_hf.records import check_adapter, load_results
from focus_hf.train import RichProgress, TrainingDiverged, TrainRecipe, last_checkpoint, train
from focus_hf.train.checkpoints import BASE_WEIGHTS


def recipe(tiny, out, **changes):
    values = {
        "model": str(tiny / "base"),
        "train_file": [str(tiny / "train.txt")],
        "eval_file": [str(tiny / "held_out.txt")],
        "output_dir": str(out),
        "num_groups": 4,
        "local_window": 8,
        "seq_len": 64,
        "max_steps": 6,
        "eval_windows": 8,
        "calibration_windows": 16,
        "logging_steps": 1,
        "trainer": {"use_cpu": True, "disable_tqdm": True},
    }
    return TrainRecipe(**{**values, **changes})


def weights(folder):
    return load_file(folder / "adapter_model.safetensors")


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "adapter"
    write = partial(write_card, base_model="org/base")
    return train(recipe(tiny, out, eval_steps=3, gate="additive"), on_saved=write)


def test_it_leaves_an_adapter_with_measured_quality_and_a_card(trained, tiny):
    config = check_adapter(trained.folder)
    assert (config.num_groups, config.layers, config.gate_strength) == (4, [0, 1], 8.0)
    results = load_results(trained.folder)
    assert results == trained.results
    (evaluation,) = results.evaluations
    assert [(row["mode"], row["top_k"]) for row in evaluation.rows] == [
        ("dense", None),
        ("local", None),
        ("soft", None),
        ("hard", 1),
        ("window", 1),
        ("hard", 2),
        ("window", 2),
    ]
    assert evaluation.data == "held_out.txt" and evaluation.revision.startswith("sha256:")
    assert results.largest_group <= 1.5 / 4
    facts = results.training
    assert facts["data"] == "train.txt" and facts["data revision"].startswith("sha256:")
    assert facts["optimizer steps"] == 6 and facts["windows per step"] == 4 and facts["processes"] == 1
    assert facts["gate"] == "additive, strength 1 to 8"
    assert {"torch", "transformers", "on", "date"} <= set(results.measured_with)
    card = (trained.folder / "README.md").read_text()
    assert "base_model: org/base" in card and "focus_hf:begin training" in card
    for path in trained.folder.rglob("*"):
        if path.suffix in (".md", ".json") and path.name != "adapter_config.json" and "trainer" not in path.parts:
            assert str(tiny) not in path.read_text(), path  # no folder of this machine


def test_the_log_shows_the_groups_beside_the_loss(trained):
    log = json.loads((trained.folder / "training_log.json").read_text())
    steps = [entry for entry in log if "loss" in entry]
    assert [entry["step"] for entry in steps] == [1, 2, 3, 4, 5, 6]
    for entry in steps:
        assert 0.25 <= entry["largest_group"] <= 1 and 0.25 < entry["confidence"] <= 1 and 0 < entry["pairs"] <= 1
    assert [entry["step"] for entry in log if "eval_loss" in entry] == [3, 6]


def test_the_adapter_loads_and_the_base_is_untouched(trained, tiny):
    before = load_file(tiny / "base" / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tiny / "base")
    model.load_adapter(str(trained.folder))
    for name, parameter in model.named_parameters():
        if "focus_" not in name and name in before:
            assert torch.equal(parameter, before[name]), name
    assert all("focus_" in name for name in weights(trained.folder))


class Interrupt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def test_an_interrupted_run_resumes_as_if_nothing_had_happened(tiny, tmp_path):
    whole = train(recipe(tiny, tmp_path / "whole", save_steps=2))
    with pytest.raises(KeyboardInterrupt):
        train(recipe(tiny, tmp_path / "cut", save_steps=2), [Interrupt(5)])
    assert last_checkpoint(tmp_path / "cut" / "trainer").name == "checkpoint-4"
    resumed = train(recipe(tiny, tmp_path / "cut", save_steps=2, resume=True))
    assert same(weights(whole.folder), weights(resumed.folder))
    losses = [[entry["loss"] for entry in result.log if "loss" in entry] for result in (whole, resumed)]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    assert whole.results.evaluations == resumed.results.evaluations
    assert whole.results.training["gate"] == "hard, sharpness 2"
    assert [row["mode"] for row in whole.results.evaluations[0].rows] == [
        "dense",
        "local",
        "hard",
        "window",
        "hard",
        "window",
    ]


def test_a_half_written_checkpoint_is_passed_over(tiny, tmp_path):
    train(recipe(tiny, tmp_path / "out", save_steps=2, max_steps=4))
    newest = tmp_path / "out" / "trainer" / "checkpoint-4"
    content = (newest / "adapter_model.safetensors").read_bytes()
    (newest / "adapter_model.safetensors").write_bytes(content[: len(content) // 2])
    assert last_checkpoint(newest.parent).name == "checkpoint-2"
    (newest.parent / "checkpoint-2" / "trainer_state.json").unlink()
    assert last_checkpoint(newest.parent) is None
    assert last_checkpoint(tmp_path / "nowhere") is None


def test_nothing_is_overwritten_unasked(trained, tiny, tmp_path):
    before = weights(trained.folder)
    with pytest.raises(ValueError, match="already holds an adapter: choose another output_dir, or pass --overwrite"):
        train(recipe(tiny, trained.folder))
    assert same(before, weights(trained.folder))
    with pytest.raises(KeyboardInterrupt):
        train(recipe(tiny, tmp_path / "cut", save_steps=2), [Interrupt(3)])
    with pytest.raises(ValueError, match="pass --resume to continue it"):
        train(recipe(tiny, tmp_path / "cut"))


def test_overwriting_leaves_nothing_of_the_old_run_and_all_of_what_a_person_wrote(tiny, tmp_path):
    out = tmp_path / "out"
    first = train(recipe(tiny, out, save_steps=2))
    (out / "README.md").write_text("My own words.")
    (out / "focus_groups.json").write_text("{}")
    (out / "figures" / "groups-map.png").write_bytes(b"")
    with pytest.raises(KeyboardInterrupt):
        train(recipe(tiny, out, seed=1, overwrite=True, save_steps=2), [Interrupt(3)])
    assert same(weights(out), weights(first.folder))  # until the new one is there
    assert last_checkpoint(out / "trainer").name == "checkpoint-2"  # of the new run, not step 6 of the old
    train(recipe(tiny, out, seed=1, overwrite=True), on_saved=partial(write_card, base_model="org/base"))
    card = (out / "README.md").read_text()
    assert "My own words." in card and "base_model: org/base" in card and "focus_hf:begin summary" in card
    assert not (out / "focus_groups.json").exists() and not (out / "figures" / "groups-map.png").exists()


class Poison(TrainerCallback):
    """Makes the loss NaN from a step on."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step + 1 == self.step:
            model.get_base_model().lm_head.register_forward_hook(lambda *_: _[2] * float("nan"))


def test_nan_stops_the_training_and_keeps_what_was_good(tiny, tmp_path):
    with pytest.raises(TrainingDiverged, match="not finite at step 5. Lower the learning rate"):
        train(recipe(tiny, tmp_path / "nan", save_steps=2), [Poison(5)])
    good = weights(tmp_path / "nan" / "trainer" / "last_good")
    assert all(torch.isfinite(tensor).all() for tensor in good.values())
    with pytest.raises(KeyboardInterrupt):
        train(recipe(tiny, tmp_path / "cut", save_steps=4), [Interrupt(4)])
    checkpoint = weights(tmp_path / "nan" / "trainer" / "checkpoint-4")
    assert all(torch.isfinite(tensor).all() for tensor in checkpoint.values())
    trained = [name for name in good if not name.endswith("balance")]
    assert all(torch.equal(good[name], checkpoint[name]) for name in trained)  # step 4, whole
    assert not (tmp_path / "nan" / "adapter_model.safetensors").exists()


def test_early_stopping_keeps_the_best(tiny, tmp_path):
    result = train(recipe(tiny, tmp_path / "out", max_steps=40, eval_steps=1, early_stopping=2, learning_rate=3.0))
    measured = [(entry["eval_loss"], entry["step"]) for entry in result.log if "eval_loss" in entry]
    assert len(measured) < 40
    best = min(measured)[1]
    assert measured[-1][1] == best + 2
    kept = weights(result.folder)
    checkpoint = weights(tmp_path / "out" / "trainer" / f"checkpoint-{best}")
    for name in kept:
        if "proj" in name:
            assert torch.equal(kept[name], checkpoint[name])
        elif "centroids" in name:  # calibration scales them, and nothing else
            factor = kept[name].norm() / checkpoint[name].norm()
            torch.testing.assert_close(kept[name], factor * checkpoint[name])


def test_full_training_learns_centroids_first_and_the_base_after(tiny, tmp_path):
    class Watch(TrainerCallback):
        changed: list = []

        def on_step_end(self, args, state, control, model=None, **kwargs):
            weight = model.get_base_model().model.layers[0].mlp.up_proj.weight
            self.changed.append(not torch.equal(weight, start))

    start = load_file(tiny / "base" / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    watch = Watch()
    result = train(
        recipe(tiny, tmp_path / "out", weights="trained", centroid_steps=3, base_learning_rate=1e-3), [watch]
    )
    assert watch.changed == [False] * 3 + [True] * 3
    base = AutoModelForCausalLM.from_pretrained(result.folder / "base")
    assert not any("focus" in name for name, _ in base.named_parameters())
    assert not torch.equal(base.model.layers[0].mlp.up_proj.weight, start)
    model = AutoModelForCausalLM.from_pretrained(str(result.folder))  # the adapter names its own base
    ids = torch.arange(60)[None]
    expected = focus_hf.evaluate.perplexity(model.eval(), ids)
    base.load_adapter(str(result.folder))
    assert focus_hf.evaluate.perplexity(base.eval(), ids) == expected
    assert result.results.training["weights"] == "base model trained too"


def test_full_training_resumes_too(tiny, tmp_path):
    changes = {"weights": "trained", "base_learning_rate": 1e-3, "save_steps": 2, "max_steps": 4}
    whole = train(recipe(tiny, tmp_path / "whole", **changes))
    with pytest.raises(KeyboardInterrupt):
        train(recipe(tiny, tmp_path / "cut", **changes), [Interrupt(3)])
    assert (tmp_path / "cut" / "trainer" / "checkpoint-2" / BASE_WEIGHTS).is_file()
    resumed = train(recipe(tiny, tmp_path / "cut", resume=True, **changes))
    assert same(weights(whole.folder), weights(resumed.folder))
    assert same(*(load_file(r.folder / "base" / "model.safetensors") for r in (whole, resumed)))
    with pytest.raises(ValueError, match="holds no base weights: it was trained with frozen weights"):
        train(recipe(tiny, tmp_path / "frozen", save_steps=2, max_steps=2))
        train(recipe(tiny, tmp_path / "frozen", resume=True, **changes))


def test_training_from_scratch_learns(tiny, tmp_path):
    result = train(
        recipe(
            tiny,
            tmp_path / "out",
            weights="trained",
            from_scratch=True,
            base_learning_rate=1e-2,
            max_steps=30,
            logging_steps=5,
        )
    )
    losses = [entry["loss"] for entry in result.log if "loss" in entry]
    assert losses[-1] < losses[0] - 1.0
    assert (result.folder / "base" / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_file": ["{tiny}/empty.txt"]}, "empty.txt holds no text"),
        ({"train_file": ["{tiny}/short.txt"]}, "short.txt: The text has . tokens, fewer than one window of 64"),
        ({"train_file": ["{tiny}/latin.txt"]}, "latin.txt is not UTF-8 text"),
        ({"train_file": ["{tiny}/bad.jsonl"]}, "bad.jsonl, line 2: no JSON object with 'text'"),
        ({"train_file": []}, "Give either text files or the name of a data set"),
        ({"seq_len": 1024}, "seq_len is 1024, but the model has 512 positions. Use at most 512"),
        ({"local_window": 59}, "seq_len is 64, but centroids learn from pairs .* Use a seq_len of at least 65"),
        ({"dense_below": 64}, "seq_len is 64, but centroids learn from pairs .* Use a seq_len of at least 65"),
        ({"tokenizer": "{tiny}/large"}, "The tokenizer does not fit the model: train.txt has token id"),
        ({"eval_file": [], "eval_share": 0.0}, "Nothing to measure on"),
        ({"trainer": {"use_cpu": True, "speed": 3}}, "trainer: got an unexpected keyword argument 'speed'"),
    ],
)
def test_bad_input_is_named(tiny, tmp_path, changes, message):
    (tiny / "empty.txt").write_text(" \n ")
    (tiny / "short.txt").write_text("a b")
    (tiny / "latin.txt").write_bytes(b"caf\xe9")
    (tiny / "bad.jsonl").write_text('{"text": "good"}\n{"txt": "bad"}\n')
    if not (tiny / "large").exists():
        from focus_hf.demo.tiny_base import python_topics, train_tokenizer

        tokenizer = train_tokenizer(python_topics()[0][:60_000])
        tokenizer.add_tokens([word for word in {"the", "of", "is"}])
        tokenizer.save_pretrained(tiny / "large")
    filled = {
        name: [part.format(tiny=tiny) for part in value]
        if isinstance(value, list)
        else (value.format(tiny=tiny) if isinstance(value, str) else value)
        for name, value in changes.items()
    }
    with pytest.raises((ValueError, OSError), match=message):
        train(recipe(tiny, tmp_path / "out", **filled))
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_the_shortest_windows_that_teach_centroids_something(tiny, tmp_path):
    train(recipe(tiny, tmp_path / "out", local_window=58, max_steps=1))


def test_a_tokenizer_whose_ids_fit_by_chance_is_found_out(tiny, tmp_path):
    """A model that has learnt something predicts another tokenizer's ids worse than chance."""
    learnt = train(
        recipe(tiny, tmp_path / "out", weights="trained", from_scratch=True, base_learning_rate=2e-2, max_steps=60)
    )
    model = AutoModelForCausalLM.from_pretrained(learnt.folder / "base")
    shuffled = torch.randperm(model.config.vocab_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():  # as if ids meant other words, with a confident model
        weight = model.get_input_embeddings().weight
        weight.copy_(weight[shuffled] * 8)
    model.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="predicts this text worse than chance"):
        train(recipe(tiny, tmp_path / "no", model=str(tmp_path / "other"), tokenizer=str(tiny / "base")))


def test_a_full_disk_leaves_the_older_checkpoint(tiny, tmp_path):
    """After three steps no file may grow beyond 2 kB, so the second checkpoint cannot be written."""

    class FillDisk(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(OSError, match="cannot write to .*out.*: free some space, then continue from checkpoint-2"):
            train(recipe(tiny, tmp_path / "out", save_steps=2), [FillDisk()])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert last_checkpoint(tmp_path / "out" / "trainer").name == "checkpoint-2"
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_progress_is_shown(tiny, tmp_path):
    from rich.progress import Progress

    with Progress(disable=True) as progress:
        train(recipe(tiny, tmp_path / "out", max_steps=2), [RichProgress(progress, "centroids")])
    (task,) = progress.tasks
    assert task.completed == 2
    assert all(part in task.description for part in ("centroids (loss ", "largest group ", "pairs "))


def test_mixed_precision_accumulation_and_recomputation(tiny, tmp_path):
    """All three at once; recomputing activations changes nothing but memory."""
    changes = {"bf16": True, "gradient_accumulation_steps": 2, "batch_size": 2, "max_steps": 3}
    plain, again = (
        train(recipe(tiny, tmp_path / str(checkpointing), gradient_checkpointing=checkpointing, **changes))
        for checkpointing in (False, True)
    )
    assert plain.results.training["windows per step"] == 4 and plain.results.training["precision"] == "bf16"
    first, second = weights(plain.folder), weights(again.folder)
    assert all(torch.allclose(first[name], second[name], atol=1e-3) for name in first)
