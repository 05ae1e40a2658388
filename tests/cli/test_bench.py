"""`focus-hf bench` and `info`: what they print, and that no number is made up."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from focus_hf.attention import count_pairs
from focus_hf.bench import Measurement, Setting, bench_attention, bench_decode, bench_memory, grid
from focus_hf.bench.attention import random_problem
from focus_hf.bench.report import to_markdown
from focus_hf.machine import environment
from tests.cli.test_cli import focus_hf as run
from tests.cli.test_cli import refusal

SMALL = ["--lengths", "256", "--local-window", "16", "--heads", "2", "--head-dim", "8", "--seconds", "0.1"]


def test_attention_and_decoding_as_json_on_the_screen():
    result = run("bench", "--what", "attention,decode", *SMALL, "--top-k", "1,2", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["environment"]["packages"]["torch"] == torch.__version__
    kinds = [(measured["kind"], measured["top_k"]) for measured in document["results"]]
    assert kinds == [("attention", 1), ("attention", 2), ("decode", 1), ("decode", 2)]
    for measured in document["results"]:
        assert measured["dense"] > 0 and measured["focus"] > 0
        assert measured["ratio"] == pytest.approx(measured["dense"] / measured["focus"])
        assert measured["limit"] > 1


@pytest.mark.parametrize(
    ("what", "kinds"),
    [
        ("attention,decode", ["attention", "decode"]),
        pytest.param(
            "model,memory",
            ["prefill", "generate", "memory of attention", "memory of model"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_everything_else_into_files(tmp_path, what, kinds):
    out = [str(tmp_path / name) for name in ("r.json", "r.md", "r.png")]
    result = run(
        *("bench", "--what", what, *SMALL),
        *("--json", out[0], "--markdown", out[1], "--plot", out[2]),
    )
    assert result.returncode == 0, result.stderr
    results = json.loads((tmp_path / "r.json").read_text())["results"]
    assert [r["kind"] for r in results] == kinds
    assert all(r["dense"] > 0 and r["focus"] > 0 for r in results)
    assert f"| {kinds[-1]} |" in (tmp_path / "r.md").read_text()
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json", "r.md", "r.png"]


def test_serving_has_two_dense_opponents():
    result = run("bench", "--what", "serving", *SMALL, "--json")
    assert result.returncode == 0, result.stderr
    serving, first = json.loads(result.stdout)["results"]
    assert (serving["kind"], first["kind"]) == ("serving", "first token")
    own, each = "dense, transformers' own (ms)", "dense, each request for itself (ms)"
    for measured in (serving, first):
        assert measured["dense"] == pytest.approx(min(measured["extra"][own], measured["extra"][each]), abs=0.01)
        assert measured["focus"] > 0 and measured["limit"] > 1
    assert serving["extra"]["focus requests/s"] == pytest.approx(1e3 / serving["focus"], rel=0.01)


def test_info_names_the_kernel_in_use():
    result = run("info", "--json")
    facts = json.loads(result.stdout)
    assert facts["devices"][0]["kernel"] == "cpu-flash"
    assert facts["kernels"]["cpu-flash"] == "available"
    assert "cpu-flash" in run("info").stdout


def test_info_says_which_flash_attention_there_is_and_how_to_get_it(tmp_path, monkeypatch):
    missing = environment()
    assert missing["torch_flash"]["FlashAttention 4"].endswith("(pip install 'focus-hf[flash4]')")
    for package, version in (("flash_attn_3", "3.0.0"), ("flash_attn_4", "4.0.0b36")):
        (tmp_path / f"{package}-{version}.dist-info").mkdir()
        (tmp_path / f"{package}-{version}.dist-info" / "METADATA").write_text(f"Name: {package}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = environment()
    assert found["packages"]["flash-attn-4"] == "4.0.0b36"
    on = 'flash-attn-4 4.0.0b36: torch.nn.attention.activate_flash_attention_impl("FA4") turns it on'
    assert found["torch_flash"]["FlashAttention 4"] == on
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["flash4"][0].startswith("flash-attn-4>=4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--what", "speed"], "--what must be of attention, decode, model, memory, serving, got 'speed'"),
        (["--lengths", "1k"], "--lengths takes whole numbers with commas between them, got '1k'"),
        (["--lengths", "0"], "lengths must be positive, got 0"),
        (["--local-window", "-1"], "local_window must not be negative, got -1"),
        (["--heads", "3", "--kv-heads", "2"], "heads (3) must be a multiple of kv_heads (2)"),
        (["--device", "abacus"], "device 'abacus' cannot be used here"),
        (["--dtype", "int8"], "dtype must be float32, bfloat16 or float16, got 'int8'"),
        (["--kernel", "fast", "--lengths", "64"], "kernel must be 'auto' or one of"),
    ],
)
def test_bad_input_gives_one_line(arguments, message):
    assert message in refusal("bench", *arguments)


def test_limits_and_pairs_are_counted():
    setting = Setting(2100, num_groups=4, top_k=1, local_window=20, heads=2, kv_heads=1, head_dim=8)
    measured = bench_attention(setting, seconds=0.01)
    attended, possible = count_pairs(random_problem(setting).who)
    assert measured.limit == pytest.approx(possible / attended.item())
    assert measured.path.startswith("grouped") and attended.item() / possible <= measured.computed <= 1.0
    # four groups, so a query reads a quarter of the keys, its window and the sinks
    expected = 2100 / (21 + 4 + (2100 - 21 - 4) / 4)
    assert bench_decode(setting, seconds=0.01).limit == pytest.approx(expected, rel=0.15)


@pytest.mark.slow  # each figure is a process of its own
def test_memory_counts_what_the_inputs_take():
    setting = Setting(8192, heads=4, kv_heads=4, head_dim=64)
    measured = bench_memory(setting)
    inputs_and_output = 4 * 8192 * 4 * 64 * 4
    assert inputs_and_output * 0.9 <= measured.dense <= inputs_and_output * 1.6
    assert measured.focus >= inputs_and_output * 0.9


def test_the_grid_leaves_out_what_cannot_be():
    settings = list(grid([64], [2, 4], [1, 3], [8], ["float32"]))
    assert [(s.num_groups, s.top_k) for s in settings] == [(2, 1), (4, 1), (4, 3)]


def test_a_table_says_what_was_not_counted():
    text = to_markdown([Measurement("generate", Setting(64), 2.0, 1.0, baseline="small Llama")])
    assert "| generate | 64 | K=8 k=1 w=128 float32 | 2.00 ms | 1.00 ms | 2.00x |  |  | against small Llama |" in text


def test_a_missing_package_is_named_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("bench", *SMALL, "--plot", str(tmp_path / "r.png"))
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.strip() == "focus-hf: This needs matplotlib: pip install 'focus-hf[viz]'"
