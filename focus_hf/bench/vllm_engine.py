"""vLLM with an adapter, beside vLLM as it is: each engine in a process of its own, with the same requests.

As a program it is one of the two: it reads what to do from standard input, and writes times to a file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from ..evaluate.checks import check_length
from ..hub import adapter_folder
from ..records import read_config
from ..texts import TextSource, tokenize
from .serving import BATCH_TOKENS, NEW_TOKENS, REQUESTS, Served, measurements
from .settings import Measurement, Setting

#: Times that an engine answers all requests; tokens of prompts that it answers before, which are not measured.
_TURNS, _WARM_UP = 2, 256

#: Of an engine on a CPU, where nothing else is said: gigabytes for keys and values, and no threads of its own choice.
_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}


def bench_vllm(setting: Setting, adapter: str, base: str | None = None, text: Path | None = None) -> list[Measurement]:
    """`REQUESTS` prompts that arrive together, each answered with `NEW_TOKENS` tokens, by vLLM's own attention and
    with the adapter; neither shares what prompts begin with.

    Args:
        setting: its length is that of a prompt.
        adapter: a folder or a Hub id.
        base: the model, likewise; by default the adapter's.
        text: whose tokens the prompts are, from places spread over it; random ones without.

    Returns:
        See `bench_serving`.

    Raises:
        ValueError: the model has fewer positions, or the text too few tokens.
        ModuleNotFoundError: vLLM is missing.
        RuntimeError: an engine failed.
    """
    if find_spec("vllm") is None:
        raise ModuleNotFoundError('vLLM is missing: pip install "focus-hf[vllm]".', name="vllm")
    folder = adapter_folder(adapter)
    config = read_config(folder)
    base = base or str(config.base_model_name_or_path)
    check_length(setting.length + NEW_TOKENS, AutoConfig.from_pretrained(base))
    dial: dict[str, Any] = {} if config.by_cells else {"top_k": setting.top_k}
    if setting.pairs is not None:
        dial |= {"pairs": setting.pairs, "length": setting.length}
    prompts = _prompts(setting, base, text)
    arguments = {
        "model": base,
        "dtype": setting.dtype,
        "seed": setting.seed,
        "max_model_len": setting.length + NEW_TOKENS,
        "max_num_batched_tokens": BATCH_TOKENS,
        "max_num_seqs": REQUESTS,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
    }
    served = {"vLLM's own": _in_a_process(arguments, prompts)}
    arguments["additional_config"] = {"focus": {"adapter": str(folder), **dial}}
    return measurements(setting, served, _in_a_process(arguments, prompts))


def _prompts(setting: Setting, base: str, text: Path | None) -> list[list[int]]:
    if text is None:
        vocabulary = AutoConfig.from_pretrained(base).get_text_config().vocab_size
        generator = torch.Generator().manual_seed(setting.seed)
        return torch.randint(0, vocabulary, (REQUESTS, setting.length), generator=generator).tolist()
    documents = TextSource((str(text),)).load().documents
    tokens = tokenize(AutoTokenizer.from_pretrained(base), "".join(documents))
    if (room := len(tokens) - setting.length) < REQUESTS:
        raise ValueError(f"{text} has {len(tokens):,} tokens, too few for {REQUESTS} prompts of {setting.length:,}.")
    starts = range(0, room, room // REQUESTS)[:REQUESTS]
    return [tokens[start : start + setting.length] for start in starts]


def _in_a_process(arguments: dict[str, Any], prompts: list[list[int]]) -> Served:
    """What an engine with these arguments takes."""
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    environment = {**_ENVIRONMENT, **os.environ, **threads, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "served.json"
        command = [sys.executable, "-m", __name__, str(out)]
        done = subprocess.run(
            command, input=json.dumps([arguments, prompts]), env=environment, capture_output=True, text=True
        )
        if done.returncode or not out.exists():
            said = [line.strip() for line in done.stderr.splitlines() if "Error" in line] or ["it does not say why"]
            raise RuntimeError(f"vLLM failed: {said[-1]}")
        return Served(*json.loads(out.read_text()))


def _serve(engine: Any, prompts: list[list[int]], plan: Any) -> Served:
    first: dict[str, float] = {}
    start, worked = time.perf_counter(), time.process_time()
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, plan)
    while engine.has_unfinished_requests():
        for output in engine.step():
            first.setdefault(output.request_id, time.perf_counter() - start)
    total, worked = time.perf_counter() - start, time.process_time() - worked
    each = 1e3 / len(prompts)
    return Served(total * each, median(first.values()) * 1e3, worked * each)


def main() -> None:
    """Serve what standard input says; see `_in_a_process`."""
    from vllm import LLM, SamplingParams

    arguments, prompts = json.load(sys.stdin)
    engine = LLM(**arguments).llm_engine
    plan = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    _serve(engine, [prompt[:_WARM_UP] for prompt in prompts], plan)
    turns = [_serve(engine, prompts, plan) for _ in range(_TURNS)]
    found = [median(values) for values in zip(*turns, strict=True)]
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
