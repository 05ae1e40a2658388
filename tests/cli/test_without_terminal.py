"""Long work in a log file: what it says while it runs, and what it leaves when it is stopped before its end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from focus_hf.evaluate.leave import take_sample
from focus_hf.progress import LineProgress, progress_display
from focus_hf.records import check_adapter, load_results
from focus_hf.records.adapter_files import weights_hash
from focus_hf.records.sample import TokenSample, same_groups
from focus_hf.texts import TextSource, cut
from focus_hf.train.calibration import largest_groups
from tests.cli.test_cli import focus_hf

FOCUS_HF = Path(sys.executable).with_name("focus-hf")


def train_command(tiny, out, *more):
    command = [FOCUS_HF, "train", "--model", tiny / "base", "--train-file", tiny / "train.txt", "--output-dir", out]
    command += ["--seq-len", 64, "--num-groups", 4, "--local-window", 8, "--calibration-windows", 16]
    return list(map(str, [*command, "--base-model", "org/base", "--trainer", "use_cpu=true", *more]))


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """A training without a terminal: its folder, and what it printed."""
    out = tmp_path_factory.mktemp("log") / "adapter"
    more = ["--eval-file", tiny / "held_out.txt", "--eval-windows", 8, "--max-steps", 6, "--logging-steps", 2]
    done = subprocess.run(train_command(tiny, out, *more), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return out, done.stderr


def test_training_writes_a_line_at_every_logging_step(trained):
    lines = trained[1].splitlines()
    clock = r"\d:\d\d:\d\d"
    figures = r"loss \d+\.\d\d, largest group \d+%, pairs \d+%"
    pattern = rf"centroids \({figures}\): (\d+)/6, {clock} so far(, {clock} left)?"
    steps = [match for line in lines if (match := re.fullmatch(pattern, line))]
    assert [match[1] for match in steps] == ["2", "4", "6"]
    assert [match[2] is not None for match in steps] == [True, True, False]
    said = [line for line in lines if line in ("reading text", "training", "balancing groups", "measuring")]
    assert said == ["reading text", "training", "balancing groups", "measuring"]
    measured = [line for line in lines if line.startswith("measured ")]
    assert len(measured) == 6 and measured[0] == "measured held_out.txt, 64 tokens: dense (base model)"
    assert "\x1b" not in trained[1] and "\r" not in trained[1]


def test_eval_and_groups_say_how_far_they_are(trained, tiny):
    shared = ["--adapter", trained[0], "--model", tiny / "base", "--text", tiny / "held_out.txt", "--seq-len", "64"]
    done = focus_hf("eval", *shared, "--top-k", "1,2")
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stderr.splitlines() if line.startswith("held_out.txt, 64 tokens: ")]
    assert [re.search(r": (\d)/6, \d:\d\d:\d\d so far", row)[1] for row in rows] == list("123456"), done.stderr
    done = focus_hf("groups", *shared)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"tokens: [\d,]{5,}, \d:\d\d:\d\d so far", done.stderr.splitlines()[-1]), done.stderr


def test_lines_are_few_when_there_is_nothing_new_to_say(capsys):
    now = [0.0]
    progress = LineProgress(Console(stderr=True), every=30)
    progress.get_time = lambda: now[0]
    with progress:
        task = progress.add_task("tokens", total=400)
        for _ in range(100):
            now[0] += 1
            progress.advance(task, 4)
    assert capsys.readouterr().err.splitlines() == [
        "tokens: 120/400, 0:00:30 so far, 0:01:10 left",
        "tokens: 240/400, 0:01:00 so far, 0:00:40 left",
        "tokens: 360/400, 0:01:30 so far, 0:00:10 left",
        "tokens: 400/400, 0:01:40 so far",
    ]


def test_a_terminal_gets_bars():
    assert not isinstance(progress_display(Console(force_terminal=True, force_interactive=True)), LineProgress)
    assert isinstance(progress_display(Console(force_terminal=True, force_interactive=False)), LineProgress)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_stopped_while_it_measures_it_leaves_an_adapter_that_works(tiny, tmp_path, how):
    long = tmp_path / "long.txt"
    long.write_text((tiny / "held_out.txt").read_text() * 40)
    out = tmp_path / "adapter"
    command = train_command(tiny, out, "--eval-file", long, "--eval-windows", 100_000, "--max-steps", 4)
    hear = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell in the background makes children deaf
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=hear
    ) as process:
        for line in process.stderr:
            if line == "measuring\n":
                process.send_signal(how)
                break
        rest = process.stderr.read()
    assert process.returncode == (-9 if how == signal.SIGKILL else 130), rest
    if how == signal.SIGINT:
        assert "Interrupted: the adapter is in" in rest and "balanced but not measured" in rest
        assert "Traceback" not in rest

    assert check_adapter(out).num_groups == 4
    results = load_results(out)
    assert results.evaluations == [] and results.training["optimizer steps"] == 4
    assert results.weights_sha256 == weights_hash(out)
    card = (out / "README.md").read_text()
    assert "focus_hf:begin training" in card and "## Quality" not in card
    model = AutoModelForCausalLM.from_pretrained(tiny / "base")
    model.load_adapter(str(out))
    ids = TextSource((str(tiny / "train.txt"),)).load().token_ids(AutoTokenizer.from_pretrained(tiny / "base"))
    windows = cut(ids, 64, None)
    sample = windows[:: len(windows) // 16][:16]
    shares = largest_groups(model, sample.split(4))
    assert max(shares.values()) == pytest.approx(results.largest_group, abs=1e-6) and results.largest_group < 1.5 / 4
    recorded = TokenSample.load(out)
    assert same_groups(recorded, take_sample(model, torch.tensor(recorded.ids))) == 1.0

    if how == signal.SIGINT:  # what it told us to do
        text = ["--text", tiny / "held_out.txt", "--seq-len", "64", "--model", tiny / "base"]
        command = [FOCUS_HF, "eval", "--adapter", out, *text, "--write"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ})
        assert done.returncode == 0, done.stderr
        results = load_results(out)
        assert len(results.evaluations) == 1 and results.training["optimizer steps"] == 4
