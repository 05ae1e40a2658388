"""The command line as a program: what it prints, where, and its exit codes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner

from focus_hf.adapter.save import save_adapter
from focus_hf.cli import app, main
from focus_hf.cli.app import HEADINGS
from focus_hf.local_hub import LocalHub
from tests.families import focus_model, httpx


def program(*arguments, timeout=240, **environment):
    """The command in a process of its own, which takes seconds to start."""
    return subprocess.run(
        [Path(sys.executable).with_name("focus-hf"), *map(str, arguments)],
        env={**os.environ, "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def focus_hf(*arguments):
    """The command in this process, with the warnings that a process of its own would show."""
    line = ["focus-hf", *map(str, arguments)]
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with (
        mock.patch.object(sys, "argv", line),
        mock.patch.dict(os.environ, COLUMNS="200"),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        warnings.resetwarnings()
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        try:
            main()
        except SystemExit as stopped:
            code = stopped.code or 0
    return subprocess.CompletedProcess(line, code, out.getvalue(), err.getvalue())


def refusal(*arguments):
    """What a command that fails says."""
    done = focus_hf(*arguments)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    model = focus_model("llama")
    model.peft_config["default"].base_model_name_or_path = "demo/base"
    return save_adapter(model, folder)


def test_every_command_has_help_with_an_example():
    listed = program("--help")
    assert listed.returncode == 0
    commands = [command.name or command.callback.__name__ for command in app.registered_commands]
    expected = "train fit eval compare groups explore card push pull search verify info bench demo hub"
    assert set(expected.split()) == set(commands)
    ordered = [command for names in HEADINGS.values() for command in names]
    assert sorted(ordered) == sorted(commands)  # a new command has a heading
    in_order = "Start here|demo|Make an adapter|train|fit|eval|groups|explore|compare|Share it|card|push|pull|"
    in_order += "Find one, and trust it|search|info|verify|This machine|hub|bench"
    found = [re.search(rf"^.{{1,2}} {shown} ", listed.stdout, re.MULTILINE).start() for shown in in_order.split("|")]
    assert found == sorted(found), listed.stdout
    for command in commands:
        shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
        assert shown.exit_code == 0 and f"Example: focus-hf {command}" in shown.output, shown.output


def test_help_needs_no_torch():
    tell = "import sys; sys.argv[1:] = {}\ntry:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"
    for arguments in ([], ["--help"], ["fit", "--help"], ["train", "--help"]):
        code = f"from focus_hf_command import main\n{tell.format(arguments)}"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert "Traceback" not in done.stderr, done.stderr


def test_wrong_command_lines_exit_with_2():
    for wrong in (["no-such-command"], ["push"], ["hub", "--port", "0"], ["demo", "--text", "/no/such/file"]):
        done = focus_hf(*wrong)
        assert done.returncode == 2 and "Traceback" not in done.stderr, wrong


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["push", "/no/such/folder", "a/b"], "adapter_config.json does not exist"),
        (["pull", "demo/missing"], "cannot be reached"),
        (["card", "--adapter", "/no/such/folder"], "adapter_config.json does not exist"),
    ],
)
def test_mistakes_are_one_line_and_exit_with_1(arguments, message):
    done = focus_hf(*arguments)
    assert done.returncode == 1 and message in done.stderr and done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1 and done.stderr.startswith("focus-hf: ")


def test_push_and_pull(adapter, tmp_path):
    with LocalHub(tmp_path / "hub", token="t") as hub:
        place = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "t"}
        dry = program("push", adapter, "demo/cli", "--dry-run", "--json", **place)
        assert json.loads(dry.stdout)["files"] == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
        pushed = program("push", adapter, "demo/cli", "--json", **place)
        assert pushed.returncode == 0, pushed.stderr
        assert len(json.loads(pushed.stdout)["commit"]) == 40
        pulled = program("pull", "demo/cli", tmp_path / "out", **place)
        assert pulled.returncode == 0 and (tmp_path / "out" / "adapter_model.safetensors").is_file(), pulled.stderr
        refused = program("push", adapter, "demo/cli", **{**place, "HF_TOKEN": ""})
        assert refused.returncode == 1 and "hf auth login" in refused.stderr


def test_card(adapter):
    printed = focus_hf("card", "--adapter", adapter, "--repo-id", "me/focus")
    assert printed.returncode == 0 and "base_model: demo/base" in printed.stdout
    written = focus_hf("card", "--adapter", adapter, "--repo-id", "me/focus", "--write")
    assert written.returncode == 0 and "# me/focus" in (adapter / "README.md").read_text()
    (adapter / "README.md").write_text("by hand")
    kept = focus_hf("card", "--adapter", adapter, "--repo-id", "me/focus", "--write")
    assert kept.returncode == 0
    card = (adapter / "README.md").read_text()
    assert card.index("by hand") < card.index("# me/focus")
    assert focus_hf("card", "--adapter", adapter, "--write", "--force").returncode == 0
    card = (adapter / "README.md").read_text()
    assert "focus_hf:card" in card and "by hand" not in card


def test_hub_serves_until_it_is_stopped(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "focus_hf.cli", "hub", "--root", str(tmp_path), "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            for _ in range(300):
                try:
                    answer = httpx.get(f"http://127.0.0.1:{port}/api/models")
                    break
                except httpx.TransportError:
                    time.sleep(0.1)
            assert answer.json() == []
            kept = tmp_path / "token"
            made = {"json": {"name": "x"}, "headers": {"Authorization": f"Bearer {kept.read_text()}"}}
            assert httpx.post(f"http://127.0.0.1:{port}/api/repos/create", **made).status_code == 200
        finally:
            process.terminate()
        said = process.stderr.read()
        assert f"HF_ENDPOINT=http://127.0.0.1:{port} and HF_TOKEN={kept.read_text()} (or HF_TOKEN_PATH={kept})" in said


def test_ctrl_c_in_a_training_says_how_to_go_on(tiny, tmp_path):
    out = tmp_path / "adapter"
    command = [Path(sys.executable).with_name("focus-hf"), "train", "--model", tiny / "base", "--output-dir", out]
    command += ["--train-file", tiny / "train.txt", "--eval-file", tiny / "held_out.txt", "--seq-len", "64"]
    command += [
        "--local-window",
        "8",
        "--batch-size",
        "2",
        "--max-steps",
        "5000",
        "--save-steps",
        "5",
        "--trainer",
        "use_cpu=true",
    ]
    # A shell that runs the tests in the background makes its children deaf to it.
    hear = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=hear
    ) as process:
        deadline = time.monotonic() + 200
        while not (out / "trainer" / "checkpoint-10").is_dir() and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert re.search(r"Interrupted: --resume goes on from checkpoint-\d+\.", error) and "Traceback" not in error


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_demo(tmp_path):
    done = program("demo", "--out", tmp_path, timeout=900)
    assert done.returncode == 0, done.stderr
    for shown in ("dense (base model)", "window and sinks only", "Focus, top_k=1", "model.load_adapter", "PeftModel"):
        assert shown in done.stdout
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert "## What the groups mean" in card and "figures/head-" in card
    assert (tmp_path / "adapter" / "figures" / "quality.png").stat().st_size > 10_000
    assert b"<html" in (tmp_path / "explorer.html").read_bytes()
    visit = json.loads((tmp_path / "visit.json").read_text())
    assert max(visit["logit_differences"].values()) <= 1e-4 and visit["continuation"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_demo_with_a_model_and_a_text_of_ones_own(tiny, tmp_path):
    text, base, out = tmp_path / "notes.txt", tiny / "base", tmp_path / "own"
    text.write_text("It was the best of times, it was the worst of times. " * 3000)
    own = program("demo", "--base", base, "--text", text, "--out", out, "--steps", 3, timeout=900)
    assert own.returncode == 0 and "notes-held-out.txt" in own.stdout, own.stderr
    assert "base model (loss" not in own.stdout  # it was not trained

    # what to look at, in this order, and all of it there
    order = ["1. card", "2. explorer", "3. picture", "4. local Hub"]
    found = [own.stdout.index(f"\n  {name}") for name in order]
    assert found == sorted(found)
    for named in re.findall(r"^  [123]\. \w+ +(\S+)$", own.stdout, re.MULTILINE):
        assert Path(named).stat().st_size > 1000
    root = re.search(r"focus-hf hub --root (\S+)", own.stdout)[1]
    with LocalHub(root) as hub:
        assert "What the groups mean" in httpx.get(f"{hub.endpoint}/demo/focus").text

    # every number on its card can be measured again
    texts = ["--text", out / "notes-train.txt", "--text", out / "notes-held-out.txt"]
    verified = program("verify", out / "adapter", "--model", out / "base", *texts, "--json")
    claims = json.loads(verified.stdout)["claims"]
    assert verified.returncode == 0 and {claim["verdict"] for claim in claims} == {"holds"}, verified.stdout
    assert {"perplexity", "shares", "largest"} <= {claim["what"].split()[0] for claim in claims}

    text.write_text("too short")
    refused = program("demo", "--base", base, "--text", text, "--out", tmp_path / "refused")
    assert refused.returncode == 1 and "fewer than one window of 512" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_demo_against_a_treebank(tiny, tmp_path):
    gold = "".join(
        "".join(f"{n}\t{word}\t{word}\t{tag}\t_\t_\t0\troot\t_\t_\n" for n, (word, tag) in enumerate(words, 1)) + "\n"
        for words in [[("The", "DET"), ("cat", "NOUN"), ("sleeps", "VERB"), (".", "PUNCT")]] * 300
    )
    (tmp_path / "gold.conllu").write_text(gold)
    text = ["--text", tiny / "train.txt", "--treebank", tmp_path / "gold.conllu"]
    done = program("demo", "--base", tiny / "base", *text, "--out", tmp_path / "out", "--steps", 1, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "NMI with kinds of words" in (tmp_path / "out" / "adapter" / "README.md").read_text()
