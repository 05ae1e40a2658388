"""Every example runs on a tiny model: what a reader copies must work."""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from focus_hf import FocusConfig
from focus_hf.adapter import focus_layers
from focus_hf.train import TrainRecipe
from tests.cli.test_cli import focus_hf

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def adapters(tiny, tmp_path_factory):
    """Two adapters of the tiny base model, whose groups matter."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("first", "second")):
        model = AutoModelForCausalLM.from_pretrained(tiny / "base")
        torch.manual_seed(seed)
        model.add_adapter(FocusConfig(num_groups=4, local_window=8, sink_tokens=1, task_type="CAUSAL_LM"), name)
        for layer in focus_layers(model):
            layer.focus_balance[name].data.normal_(std=2.0)
        model.save_pretrained(folder / name)
        config = json.loads((folder / name / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = str(tiny / "base")
        (folder / name / "adapter_config.json").write_text(json.dumps(config))
    (folder / "prompt.txt").write_text((tiny / "held_out.txt").read_text()[:900])
    return folder


@pytest.fixture
def run(monkeypatch, capsys):
    """Run an example as a program, in this process, and return what it prints."""

    def call(script, *arguments):
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return capsys.readouterr().out

    return call


def continuations(tiny, adapter, prompt, **generation):
    """Greedy continuations with the adapter and without."""
    tokenizer = AutoTokenizer.from_pretrained(tiny / "base")
    model = AutoModelForCausalLM.from_pretrained(tiny / "base")
    model.load_adapter(str(adapter))
    inputs = tokenizer(prompt, return_tensors="pt")
    texts = []
    for enabled in (True, False):
        if not enabled:
            model.disable_adapters()
        ids = model.generate(**inputs, do_sample=False, pad_token_id=tokenizer.eos_token_id, **generation)
        texts.append(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts


def test_generate(run, tiny, adapters):
    arguments = ("--adapter", adapters / "first", "--prompt-file", adapters / "prompt.txt", "--max-new-tokens", 6)
    focus, dense = continuations(tiny, adapters / "first", (adapters / "prompt.txt").read_text(), max_new_tokens=6)
    assert focus != dense
    assert run("generate.py", *arguments, "--compare") == f"Focus: {focus}\ndense: {dense}\n"
    assert run("generate.py", *arguments, "--top-k", 4, "--base", tiny / "base") == f"Focus: {dense}\n"  # every pair


def test_train_text(run, tiny, tmp_path):
    out = run(
        "train_text.py", "--base", tiny / "base", "--train-file", tiny / "train.txt", "--output-dir", tmp_path / "new",
        "--num-groups", 4, "--local-window", 8, "--seq-len", 64, "--steps", 2, "--batch-size", 2,
    )  # fmt: skip
    assert "Focus, top_k=1" in out and "dense (base model)" in out
    assert FocusConfig.from_pretrained(str(tmp_path / "new")).num_groups == 4
    assert (tmp_path / "new" / "focus_results.json").is_file()


def test_sft_trl(run, tiny, tmp_path):
    pytest.importorskip("trl")
    out = run(
        "sft_trl.py", "--base", tiny / "base", "--train-file", tiny / "held_out.txt", "--output-dir", tmp_path / "new",
        "--num-groups", 4, "--local-window", 8, "--max-length", 64, "--steps", 2,
    )  # fmt: skip
    largest = float(out.split("Largest group of any layer: ")[1].split(" %")[0])
    assert 25 <= largest < 40  # calibrated
    assert FocusConfig.from_pretrained(str(tmp_path / "new")).local_window == 8


def test_multi_gpu_as_one_process(run, tiny, adapters):
    prompt = adapters / "prompt.txt"
    focus, _ = continuations(tiny, adapters / "first", prompt.read_text(), max_new_tokens=6)
    for device_map in ("none", "cpu", "auto"):
        if device_map == "auto" and torch.cuda.is_available():
            continue  # other kernels, other rounding
        out = run(
            "multi_gpu.py", "--adapter", adapters / "first", "--prompt-file", prompt, "--device-map", device_map,
            "--max-new-tokens", 6,
        )  # fmt: skip
        assert out.endswith(f"model on cpu\n{focus}\n"), device_map


@pytest.mark.slow
def test_multi_gpu_as_two_processes(tiny, adapters):
    prompt = adapters / "prompt.txt"
    focus, dense = continuations(tiny, adapters / "first", prompt.read_text(), max_new_tokens=6)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["--adapter", adapters / "first", "--prompt-file", prompt, "--max-new-tokens", "6"]
    done = subprocess.run(
        [*command, EXAMPLES / "multi_gpu.py", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert focus in done.stdout and dense not in done.stdout


def test_dial(run, tiny, adapters):
    out = run(
        "dial.py", "--adapter", adapters / "first", "--text", tiny / "held_out.txt", "--seq-len", 96, "--windows", 2,
        "--top-k", 1, 4,
    )  # fmt: skip
    rows = {line[:44].strip(): line[44:].split() for line in out.splitlines()[1:]}
    names = ["dense (base model)", "window and sinks only", "Focus, top_k=1", "window", "Focus, top_k=4", "window"]
    assert [name.partition(" of ")[0] for name in rows] == names
    assert rows["Focus, top_k=4"][:2] == rows["dense (base model)"][:2]  # every group: every pair
    shares = [float(row[1].rstrip("%")) for row in rows.values()]
    assert shares[1] < shares[2] < shares[0] == 100


def test_switch_domains(run, tiny, adapters):
    pairs = [f"{name}={adapters / name}" for name in ("first", "second")]
    out = run(
        "switch_domains.py", "--adapters", *pairs, "--texts", f"held-out={tiny / 'held_out.txt'}",
        f"train={tiny / 'train.txt'}", "--seq-len", 64, "--windows", 2,
    )  # fmt: skip
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert list(rows) == ["perplexity", "first", "second", "dense"] and rows["perplexity"] == ["held-out", "train"]
    assert len({rows[name][0] for name in ("first", "second", "dense")}) == 3


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@contextmanager
def serving(adapter, *arguments):
    """The address of `examples/serve.py`, while it serves this adapter."""
    for package in ("fastapi", "uvicorn", "openai", "pydantic"):
        pytest.importorskip(package, reason="`transformers serve` needs transformers[serving]")
    port = free_port()
    where = ["--adapter", adapter, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    server = subprocess.Popen(
        [sys.executable, EXAMPLES / "serve.py", *where, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 600
        while True:
            assert server.poll() is None, server.stderr.read()[-3000:]
            assert time.monotonic() < deadline, "the server did not start"
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=20).close()
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        try:
            server.communicate(timeout=30)
        except subprocess.TimeoutExpired:  # continuous batching's thread does not hear of it
            server.kill()
            server.communicate()


def test_serve(tiny, adapters):
    prompt = (adapters / "prompt.txt").read_text()
    focus, dense = continuations(tiny, adapters / "first", prompt, max_new_tokens=6)
    with serving(adapters / "first") as address:
        body = {"model": "first", "prompt": prompt, "max_tokens": 6, "temperature": 0}
        served = post(f"{address}/completions", body)["choices"][0]["text"]
    assert served == focus != dense


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_serve_many_at_once(tiny, adapters):
    """Eight clients at once, streaming, through continuous batching: each reads what its prompt gives alone."""
    openai = pytest.importorskip("openai")
    text = (adapters / "prompt.txt").read_text()
    prompts = [text[: 100 * (number + 1)] for number in range(8)]
    expected = [continuations(tiny, adapters / "first", prompt, max_new_tokens=12) for prompt in prompts]
    flags = ("--continuous-batching", "--cb-num-blocks", "32", "--cb-max-batch-tokens", "128")
    with serving(adapters / "first", *flags) as address:

        def ask(prompt: str) -> str:
            client = openai.OpenAI(base_url=address, api_key="none", timeout=600)
            parts = client.completions.create(model="first", prompt=prompt, max_tokens=12, temperature=0, stream=True)
            return "".join(part.choices[0].text for part in parts)

        with ThreadPoolExecutor(len(prompts)) as clients:
            served = list(clients.map(ask, prompts))
    # A stream keeps the bytes of a character back until it is whole.
    focus, dense = ([text.rstrip("\ufffd") for text in texts] for texts in zip(*expected, strict=True))
    assert served == focus != dense


def notebook() -> dict:
    return json.loads((EXAMPLES / "explore_groups.ipynb").read_text(encoding="utf-8"))


def test_notebook_stores_no_outputs():
    for cell in notebook()["cells"]:
        assert cell["cell_type"] == "markdown" or (cell["outputs"] == [] and cell["execution_count"] is None)


@pytest.mark.slow
def test_notebook_runs(tiny, adapters, monkeypatch):
    """In a kernel of its own, as a reader runs it."""
    for package in ("matplotlib", "sklearn", "ipykernel"):
        pytest.importorskip(package)
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    (adapters / "notes.txt").write_text((tiny / "held_out.txt").read_text()[:4000])
    settings = {"ADAPTER": adapters / "first", "OTHER": adapters / "first", "TEXT": adapters / "notes.txt"}
    for name, value in {**settings, "WINDOW": 128}.items():
        monkeypatch.setenv(f"FOCUS_{name}", str(value))
    monkeypatch.delenv("MPLBACKEND", raising=False)
    book = nbformat.read(EXAMPLES / "explore_groups.ipynb", as_version=4)
    where = {"metadata": {"path": adapters}}
    nbclient.NotebookClient(book, timeout=240, startup_timeout=240, resources=where).execute()
    outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
    printed = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    assert "2 layers, 4 groups each" in printed and "tokens apart" in printed and "same 0 = 0 (1.00)" in printed
    kinds = [kind for output in outputs if output.output_type == "display_data" for kind in output.data]
    assert kinds.count("image/png") == 2 and "text/markdown" in kinds


def test_the_yaml_file_is_a_recipe():
    assert TrainRecipe.from_values(EXAMPLES / "train.yaml", {}).num_groups == 8


def test_a_first_adapter(tiny, tmp_path):
    """The file as it is, but for a tiny model, reports of our own and shorter windows."""
    reports = tmp_path / "reports"
    reports.mkdir()
    text = (tiny / "train.txt").read_text()
    documents = [text[start : start + 6000] for start in range(0, 90_000, 6000)]
    (reports / "train.jsonl").write_text(
        "".join(json.dumps({"report": one, "summary": ""}) + "\n" for one in documents)
    )
    command = ["train", "--config", EXAMPLES / "first_adapter.yaml"]
    command += [
        "--model",
        tiny / "base",
        "--base-model",
        "org/base",
        "--dataset",
        reports,
        "--column",
        "report",
        "--output-dir",
        tmp_path / "a",
    ]
    command += ["--seq-len", 256, "--local-window", 16, "--max-steps", 2, "--logging-steps", 1, "--eval-windows", 4]
    command += ["--trainer", "use_cpu=true"]
    done = focus_hf(*command)
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stderr and "top_k=1" in done.stdout and "window" in done.stdout
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["num_groups"] == 8 and config["top_k"] == 1
    card = (tmp_path / "a" / "README.md").read_text()
    assert "| gradient accumulation" not in card and "| windows per step | 4 |" in card and "reports" in card


def test_every_example_is_in_the_list():
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for file in EXAMPLES.rglob("*"):
        if file.suffix in (".py", ".ipynb", ".yaml"):
            assert file.relative_to(EXAMPLES).as_posix() in listed, file.name
            if file.suffix == ".py":
                text, name = file.read_text(encoding="utf-8"), file.relative_to(EXAMPLES).as_posix()
                assert text.startswith('"""') and f"examples/{name}" in text, "says how it is run"
