"""What a training run is told: YAML, flags, texts, schedules."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import typer

from focus_hf.adapter import focus_layers
from focus_hf.texts import Texts, TextSource, dataset_commit, tokenize_windows
from focus_hf.train import RoutingSchedule, TrainRecipe
from tests.families import focus_model


class Letters:
    """A tokenizer whose tokens are characters."""

    eos_token_id = 0

    def __call__(self, text, **kwargs):
        return {"input_ids": [ord(letter) for letter in text]}


def test_flags_stand_above_the_file(tmp_path):
    file = tmp_path / "train.yaml"
    file.write_text(
        "model: org/base\noutput-dir: out\ntrain_file: notes.txt\nlearning-rate: 1e-3\nmax_steps: 7\n"
        "trainer: {adam_beta2: 0.9}\n"
    )
    recipe = TrainRecipe.from_values(file, {"max_steps": 9})
    assert (recipe.model, recipe.output_dir, recipe.train_file) == ("org/base", "out", ["notes.txt"])
    assert (recipe.learning_rate, recipe.max_steps, recipe.trainer) == (1e-3, 9, {"adam_beta2": 0.9})
    assert recipe.focus_config().num_groups == 8 and recipe.focus_config().gate_strength == recipe.gate_end


def test_another_text_replaces_the_files_text_and_nothing_else(tmp_path):
    file = tmp_path / "train.yaml"
    file.write_text(
        "model: m\noutput_dir: o\ndataset: org/d\nsubset: s\ncolumn: report\nseq_len: 512\neval_file: e.txt"
    )
    recipe = TrainRecipe.from_values(file, {"train_file": ["notes.jsonl"]})
    assert recipe.training_source() == TextSource(("notes.jsonl",))
    assert (recipe.seq_len, recipe.eval_file) == (512, ["e.txt"])
    other = TrainRecipe.from_values(file, {"dataset": "org/other", "column": "body"})
    assert other.training_source() == TextSource((), "org/other", column="body")
    same = TrainRecipe.from_values(file, {"column": "body"})
    assert same.training_source() == TextSource((), "org/d", "s", column="body")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: m\noutput_dir: o\nsteps: 3", "Unknown option 'steps'"),
        ("output_dir: o", "model is missing: give --model"),
        ("model: m\noutput_dir: o\ngate_end: -1", "gate_end must be a positive number"),
        ("- a", "must hold names and values, got list"),
        ("a: [", "is not valid YAML"),
        ("model: m\noutput_dir: o\nlearning_rate: fast", "learning_rate must be a number, got 'fast'"),
        ("model: m\noutput_dir: o\nlearning_rate: -1", "learning_rate must be a positive number, got -1"),
        ("model: m\noutput_dir: o\nmax_steps: 0", "max_steps must be an integer of at least 1, got 0"),
        ("model: m\noutput_dir: o\neval_share: 1.0", "eval_share must be at least 0 and below 1"),
        ("model: m\noutput_dir: o\nweights: all", "weights must be one of frozen, trained, got 'all'"),
        ("model: m\noutput_dir: o\nfrom_scratch: true", "weights must be 'trained'"),
        ("model: m\noutput_dir: o\nearly_stopping: 2", "give eval_steps too"),
        ("model: m\noutput_dir: o\ntop_k: 9", r"top_k \(9\) cannot exceed num_groups \(8\)"),
    ],
)
def test_bad_recipes_are_named(tmp_path, text, message):
    file = tmp_path / "train.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        TrainRecipe.from_values(file, {})


def test_texts_of_files(tmp_path):
    (tmp_path / "a.txt").write_text("abcdef")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "gh"}) + "\n\n" + json.dumps({"text": "ijkl"}) + "\n")
    texts = TextSource((str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl"))).load()
    assert texts.documents == ["abcdef", "gh", "ijkl"] and texts.name == "a.txt, b.jsonl" and texts.dataset is None
    assert texts.token_ids(Letters()).tolist() == [*b"abcdef", 0, *b"gh", 0, *b"ijkl", 0]
    training, held_out = texts.split_tail(0.5)
    assert training.documents == ["abcdef"] and held_out.documents == ["gh", "ijkl"]
    assert held_out.name == "a.txt, b.jsonl, last 50%" and training.revision == held_out.revision
    uneven, rest = texts.split_tail(0.3)
    assert "".join(uneven.documents + rest.documents) == "abcdefghijkl" and uneven.documents[-1] == "gh"


def test_texts_of_a_data_set(tmp_path):
    import datasets

    datasets.Dataset.from_dict({"body": ["one", "two", "six"]}).to_parquet(str(tmp_path / "set" / "train.parquet"))
    source = TextSource(dataset=str(tmp_path / "set"), column="body", split="train[:2]")
    texts = source.load()
    assert texts.documents == ["one", "two"] and texts.name == "set (train[:2])" and texts.dataset is None
    some = TextSource(dataset=str(tmp_path / "set"), column="body").load(max_characters=4, seed=1)
    assert len(some.documents) == 2 and set(some.documents) < {"one", "two", "six"}
    assert some.name == "set (train, 2 of 3 documents)"
    with pytest.raises(ValueError, match="has no column 'text'; it has body"):
        TextSource(dataset=str(tmp_path / "set")).load()
    with pytest.raises(ValueError, match="either text files or the name of a data set"):
        TextSource(files=("a",), dataset="b").load()


def test_the_commit_of_a_data_set():
    import datasets

    url = "hf://datasets/org/texts@0123456789abcdef0123456789abcdef01234567/data/train.parquet"
    info = datasets.DatasetInfo(download_checksums={url: {"num_bytes": 1, "checksum": None}})
    assert dataset_commit(info) == "0123456789abcdef0123456789abcdef01234567"
    assert dataset_commit(datasets.DatasetInfo()) is None


def test_windows_of_a_text():
    assert tokenize_windows(Letters(), "abcdefghij", 4).tolist() == [[*b"abcd"], [*b"efgh"]]
    assert tokenize_windows(Letters(), "abcdefghij", 4, stride=3)[-1].tolist() == [*b"ghij"]
    with pytest.raises(ValueError, match="The text has 10 tokens, fewer than one window of 11"):
        tokenize_windows(Letters(), "abcdefghij", 11)
    assert Texts(["ab"], "one").token_ids(Letters()).tolist() == [*b"ab"]


def test_the_schedule_closes_the_gate_lets_balance_come_to_rest_and_lets_go():
    model = focus_model("llama")
    schedule = RoutingSchedule(model, gate=(1.0, 8.0), reached_at=0.5)
    layer, seen, rates = focus_layers(model)[0], [], []
    for step in range(5):
        state = type("State", (), {"global_step": step, "max_steps": 4})
        schedule.on_step_begin(None, state, None)
        seen.append(layer.gate_strength)
        rates.append(layer.balance_rate)
    assert rates == pytest.approx([0.2, 0.2 * (0.5 + math.sqrt(0.125)), 0.1, 0.2 * (0.5 - math.sqrt(0.125)), 0.0])
    assert seen == pytest.approx([1.0, math.sqrt(8), 8.0, 8.0, 8.0])
    schedule.on_train_end(None, None, None)
    assert layer.gate_strength is None and layer.balance_rate == 0.2
    for wrong in ({"gate": (0.0, 8.0)}, {"reached_at": 0.0}, {"reached_at": 1.5}):
        with pytest.raises(ValueError, match=f"RoutingSchedule: {next(iter(wrong))} must be"):
            RoutingSchedule(model, **wrong)


def test_the_command_line_loads_without_extras():
    """`focus-hf --help` must work where only the core is installed."""
    code = (
        "import sys; [sys.modules.__setitem__(name, None) for name in ('datasets', 'matplotlib', 'lm_eval', 'trl')]; "
        "import focus_hf.cli"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_flag_takes_back_what_a_file_says():
    from typer.testing import CliRunner

    import focus_hf.cli.flags as flags

    seen = {}
    app = typer.Typer()
    app.command()(flags.flags_of(TrainRecipe)(lambda given: seen.update(given)))
    done = CliRunner().invoke(
        app, ["--no-bf16", "--resume", "--max-steps", "3", "--train-file", "a", "--train-file", "b"]
    )
    assert done.exit_code == 0, done.output
    assert seen == {"bf16": False, "resume": True, "max_steps": 3, "train_file": ["a", "b"]}
