"""vLLM with an adapter gives, greedy, the tokens that transformers gives with it; needs vLLM (`make test-vllm`)."""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from focus_hf.adapter.save import save_adapter
from focus_hf.bench import Setting
from focus_hf.bench.vllm_engine import bench_vllm
from tests.families import CELLS, EACH, base_model, focus_config, focus_model, token_ids, unbalance

vllm = pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]

NEW_TOKENS = 12

#: Within the window, leaving it while they are continued, and longer than a step takes.
LENGTHS = (3, 5, 8, 9, 20, 31, 32, 33, 47, 48, 61, 64, 65, 90, 128, 150)

ADAPTERS: dict[str, Any] = {
    "shared": lambda family: focus_model(family),
    "two-groups": lambda family: focus_model(family, top_k=2, dense_below=24),
    "cells": lambda family: focus_model(family, **CELLS),
    "each": lambda family: focus_model(family, **EACH),
}


@pytest.fixture(autouse=True, scope="module")
def one_process() -> Iterator[None]:
    """The engine in this process: it starts in seconds, and its layers can be looked at."""
    before = dict(os.environ)
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_CI_ENV": "1",  # models are traced, and run by eager operations
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    yield
    os.environ.clear()
    os.environ.update(before)


def prompts_of(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    return [token_ids(1, length, seed=number)[0].tolist() for number, length in enumerate(lengths)]


def by_transformers(model: Any, prompts: Sequence[list[int]]) -> list[list[int]]:
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
        answers.append(model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :])
    return [answer.tolist() for answer in answers]


@contextmanager
def engine(base: Path, adapter: Path | None = None, **changes: Any) -> Iterator[Any]:
    """Chunked prefill, prefix caching, 16 requests at once."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    values = {
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 16,
        "block_size": 16,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "additional_config": {} if adapter is None else {"focus": {"adapter": str(adapter)}},
    }
    llm = vllm.LLM(model=str(base), **{**values, **changes})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def outputs_of(llm: Any, prompts: Sequence[list[int]]) -> Any:
    plan = vllm.SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], plan, use_tqdm=False)


def by_vllm(llm: Any, prompts: Sequence[list[int]]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs_of(llm, prompts)]


def saved(model: Any, folder: Path) -> tuple[Path, Path]:
    """Its base model and its adapter, as folders."""
    family = model.get_base_model().config.model_type
    base_model(family).save_pretrained(folder / "base")
    return folder / "base", save_adapter(model, folder / "adapter")


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", kind) for kind in ADAPTERS] + [(family, "cells") for family in ("mistral", "qwen2", "qwen3")],
)
def test_tokens_are_those_of_transformers(family, kind, tmp_path):
    model, prompts = ADAPTERS[kind](family), prompts_of()
    expected, dense = by_transformers(model, prompts), by_transformers(base_model(family), prompts)
    with engine(*saved(model, tmp_path)) as llm:
        assert bool(llm.llm_engine.vllm_config.compilation_config.mode) == (kind in ("cells", "each"))
        assert by_vllm(llm, prompts) == expected
    assert sum(one != other for one, other in zip(expected, dense, strict=True)) > len(prompts) // 2


def test_prompts_that_begin_alike_share_blocks(tmp_path):
    model = ADAPTERS["cells"]("llama")
    start = token_ids(1, 70, seed=7)[0].tolist()
    prompts = [start + tail[:length] for length, tail in zip((1, 2, 10, 40, 80), prompts_of((80,) * 5), strict=True)]
    expected = by_transformers(model, prompts)
    with engine(*saved(model, tmp_path)) as llm:
        assert by_vllm(llm, prompts[:1]) == expected[:1]
        for _ in range(2):
            outputs = outputs_of(llm, prompts)
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected
            assert all(output.num_cached_tokens >= 64 for output in outputs)


def test_requests_that_are_put_aside_begin_anew(tmp_path):
    model, prompts = ADAPTERS["cells"]("llama"), prompts_of((60, 61, 62, 63, 75, 76, 77, 78))
    expected = by_transformers(model, prompts)
    few = {"num_gpu_blocks_override": 22, "disable_log_stats": False, "max_num_batched_tokens": 256}
    with engine(*saved(model, tmp_path), **few) as llm:
        assert by_vllm(llm, prompts) == expected
        counts = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    assert counts["vllm:num_preemptions"] > 0


def of_wider_heads() -> Any:
    """A model whose heads vLLM's own CPU kernel takes."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=99, **sizes, **heads)).eval()
    for parameter in base.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.25)
    base.generation_config.eos_token_id = None
    return base


def test_without_an_adapter_vllm_is_unchanged(tmp_path):
    """And nothing of ours is imported."""
    base, prompts = of_wider_heads(), prompts_of()
    base.save_pretrained(tmp_path)
    with engine(tmp_path, enforce_eager=True, block_size=32) as llm:
        assert by_vllm(llm, prompts) == by_transformers(base, prompts)
        (modules,) = llm.apply_model(_who_attends)
    assert len(modules) == 2 and not any("focus" in module for module in modules)
    script = "import sys, focus_hf_vllm; focus_hf_vllm.register(); assert 'focus_hf' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


def _who_attends(model: Any) -> list[str]:
    return [f"{type(m.impl).__module__} {m.attn_backend.__module__}" for m in model.modules() if hasattr(m, "impl")]


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
            "speculative",
        ),
        ({"runner": "pooling"}, "run to pooling"),
    ],
)
def test_refused_in_one_line_before_anything_starts(tmp_path, changes, says):
    base, adapter = saved(focus_model("llama"), tmp_path)
    with pytest.raises(ValueError, match=says) as error, engine(base, adapter, **changes):
        pass
    assert str(error.value).startswith(f"The Focus adapter {adapter} cannot be served: ")


@pytest.mark.parametrize("routing", ["shared", "cells"])
def test_its_speed_is_measured_beside_its_own(tmp_path, routing):
    base = of_wider_heads()
    base.save_pretrained(tmp_path / "base")
    model = get_peft_model(base, focus_config(**(CELLS if routing == "cells" else {})))
    adapter = save_adapter(model, tmp_path / "adapter")
    measured = bench_vllm(Setting(100, top_k=2), str(adapter), str(tmp_path / "base"))
    assert [one.kind for one in measured] == ["serving", "first token"]
    assert all(one.dense > 0 and one.focus > 0 and one.baseline == "vLLM's own" for one in measured)


def test_a_model_of_other_sizes_is_refused(tmp_path):
    _, adapter = saved(focus_model("llama"), tmp_path)
    base_model("gpt2").save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="GPT2LMHeadModel"), engine(tmp_path / "gpt2", adapter):
        pass
    slides = base_model("mistral")
    slides.config.sliding_window = 16
    slides.save_pretrained(tmp_path / "mistral")
    with pytest.raises(ValueError, match="sliding window"), engine(tmp_path / "mistral", adapter):
        pass


def test_heads_split_over_two_processes(tmp_path):
    """vLLM's tensor parallelism; as a program, because its processes must be able to import what starts them."""
    model, prompts = ADAPTERS["cells"]("llama"), prompts_of((20, 61, 90, 5))
    base, adapter = saved(model, tmp_path)
    serving = {"additional_config": {"focus": {"adapter": str(adapter)}}, "tensor_parallel_size": 2}
    sizes = {"dtype": "float32", "max_model_len": 256, "max_num_batched_tokens": 64, "skip_tokenizer_init": True}
    script = tmp_path / "split.py"
    script.write_text(
        "import json, vllm\n"
        "if __name__ == '__main__':\n"
        f"    llm = vllm.LLM(model={str(base)!r}, **{ {**serving, **sizes}!r})\n"
        f"    plan = vllm.SamplingParams(temperature=0, max_tokens={NEW_TOKENS}, ignore_eos=True, detokenize=False)\n"
        f"    outputs = llm.generate([dict(prompt_token_ids=p) for p in {prompts!r}], plan, use_tqdm=False)\n"
        "    print('TOKENS', json.dumps([list(output.outputs[0].token_ids) for output in outputs]))\n"
    )
    cores = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], env={**os.environ, **cores}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    assert json.loads(found.removeprefix("TOKENS ")) == by_transformers(model, prompts)


def test_sixteen_clients_of_a_server(tiny, tmp_path):
    """`vllm serve`, all of its processes, and the `openai` client: each reads what its prompt gives alone."""
    openai = pytest.importorskip("openai")
    base = AutoModelForCausalLM.from_pretrained(tiny / "base").eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny / "base")
    torch.manual_seed(1)
    model = get_peft_model(base, focus_config()).eval()
    unbalance(model)
    adapter = save_adapter(model, tmp_path / "adapter")
    text = (tiny / "held_out.txt").read_text()
    prompts = [tokenizer(text[50 * n : 50 * n + 60 * (n + 1)]).input_ids[:200] for n in range(16)]
    expected = [tokenizer.decode(tokens) for tokens in by_transformers(model, prompts)]
    with model.disable_adapter():
        dense = [tokenizer.decode(tokens) for tokens in by_transformers(model, prompts)]
    with serving(tiny / "base", adapter, tmp_path / "log.txt") as address:

        def ask(prompt: list[int]) -> str:
            client = openai.OpenAI(base_url=address, api_key="none", timeout=600)
            options = {"max_tokens": NEW_TOKENS, "temperature": 0}
            extra = {"ignore_eos": True, "skip_special_tokens": False}
            return client.completions.create(model="tiny", prompt=prompt, **options, extra_body=extra).choices[0].text

        with ThreadPoolExecutor(len(prompts)) as clients:
            served = list(clients.map(ask, prompts))
    assert [one.rstrip("\ufffd") for one in served] == [one.rstrip("\ufffd") for one in expected]
    assert sum(one != other for one, other in zip(expected, dense, strict=True)) > len(prompts) // 2


#: The command `vllm`. That of vllm-cpu 0.32.0 stops at once, because it looks for the version of a package "vllm".
COMMAND = """
import importlib.metadata as metadata
own = metadata.version
names = {found.name for found in metadata.distributions()}
if "vllm" not in names:
    metadata.version = lambda name: own("vllm-cpu") + "+cpu" if name == "vllm" else own(name)
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":
    main()
"""


@contextmanager
def serving(base: Path, adapter: Path, log: Path) -> Iterator[str]:
    """The address of a `vllm serve` with an adapter, as the documentation starts it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ["--additional-config", json.dumps({"focus": {"adapter": str(adapter)}}), "--served-model-name", "tiny"]
    flags += ["--dtype", "float32", "--max-model-len", "256", "--max-num-batched-tokens", "64", "--max-num-seqs", "16"]
    server = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "serve", base, "--host", "127.0.0.1", "--port", str(port), *flags],
        env={**os.environ, "PYTHONPATH": str(ROOT), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
    )
    try:
        deadline = time.monotonic() + 900
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(timeout=120)
