"""A whole benchmark: settings through, results out."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from ..files import write_atomically
from ..hub import adapter_folder
from ..machine import environment, require, summary
from ..output import deliver
from ..progress import progress_display
from ..records import Results, check_writable, load_results, read_config, save_results
from .attention import bench_attention, bench_decode
from .memory import bench_memory
from .model import bench_model
from .report import save_plot, table, to_markdown
from .serving import bench_serving
from .settings import Measurement, Setting
from .vllm_engine import bench_vllm

#: What can be measured.
KINDS = ("attention", "decode", "model", "memory", "serving")

#: What may serve.
ENGINES = ("transformers", "vllm")

#: Large enough for a process' allocator to keep what it frees from now on, as after loading any model.
_WARM_UP_BYTES = 31 * 2**20


def run_bench(
    kinds: Sequence[str],
    settings: Sequence[Setting],
    *,
    base: str | None = None,
    adapter: str | None = None,
    device_map: str | None = None,
    engine: str = "transformers",
    text: Path | None = None,
    pairs: Sequence[float] = (),
    write: bool = False,
    threads: int | None = None,
    seconds: float = 5.0,
    json_out: str | None = None,
    markdown: Path | None = None,
    plot: Path | None = None,
) -> list[Measurement]:
    """Measure every setting, show a table, and write what was asked for.

    Args:
        kinds: of `KINDS`.
        settings: see `grid`; of an adapter, groups, window and sinks are its own.
        base, adapter, device_map: for ``"model"`` and ``"serving"``, see `bench_model`.
        engine: what serves, for ``"serving"``: of `ENGINES`.
        text: for ``"model"``, whose first tokens are the prompt, and for ``"serving"`` with vLLM.
        pairs: the dial of the adapter, a share for each setting or one for all; its own without.
        write: put the figures into the adapter's folder; its card shows them from then on.
        threads: of PyTorch on CPU.
        seconds: for each setting, at least.
        json_out: file for JSON, or ``"-"`` for standard output, where then nothing else goes.
        markdown: file for the table.
        plot: PNG of ratios against lengths.

    Raises:
        ValueError: other settings than shares.
        ModuleNotFoundError: a plot is asked for and matplotlib is missing; said before anything is measured.
    """
    if plot is not None:
        require("matplotlib")
    if write:
        check_writable(adapter or "")
    if adapter is not None:
        config = read_config(adapter_folder(adapter))
        own = {name: getattr(config, name) for name in ("num_groups", "local_window", "sink_tokens")}
        settings = list(dict.fromkeys(replace(setting, **own) for setting in settings))
    if pairs and len(pairs) not in (1, len(settings)):
        raise ValueError(f"There are {len(settings)} settings and {len(pairs)} shares of pairs: give one for each.")
    shares = itertools.cycle(pairs or [None])
    settings = [replace(setting, pairs=share) for setting, share in zip(settings, shares, strict=False)]
    if threads is not None:
        torch.set_num_threads(threads)
    torch.empty(_WARM_UP_BYTES, dtype=torch.uint8)  # freed at once
    measure: dict[str, Callable[[Setting], Sequence[Measurement]]] = {
        "attention": lambda setting: [bench_attention(setting, seconds)],
        "decode": lambda setting: [bench_decode(setting, seconds)],
        "model": lambda setting: bench_model(setting, base, adapter, device_map, text),
        "memory": lambda setting: [bench_memory(setting, "attention"), bench_memory(setting, "model")],
        "serving": lambda setting: (
            bench_vllm(setting, adapter, base, text)
            if engine == "vllm" and adapter is not None
            else bench_serving(setting, base, adapter, device_map)
        ),
    }
    results: list[Measurement] = []
    with progress_display(Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(kinds) * len(settings))
        for kind, setting in itertools.product(kinds, settings):
            what = f"{kind}, {setting.length} tokens, K={setting.num_groups}, k={setting.top_k}"
            progress.update(task, description=what)
            results += measure[kind](setting)
            progress.advance(task)
    facts = environment()
    machine = summary(facts)
    document = {"environment": facts, "results": [measured.to_dict() for measured in results]}
    deliver(json.dumps(document, indent=2) + "\n", json_out, [table(results, Console().width), Text(machine)])
    if markdown is not None:
        write_atomically(markdown, f"{to_markdown(results)}\n\n{machine}\n".encode())
    if plot is not None:
        save_plot(results, plot)
    if write and adapter is not None:
        _write_speed(results, adapter, machine)
    return results


def _write_speed(results: Sequence[Measurement], adapter: str, machine: str) -> None:
    known = load_results(adapter) or Results()
    known.speed = [
        {
            "what": measured.kind,
            "length": measured.setting.length,
            "num_groups": measured.setting.num_groups,
            "top_k": measured.setting.top_k,
            "pairs": measured.setting.pairs,
            "dense_ms": measured.dense,
            "focus_ms": measured.focus,
            "measured_with": machine,
        }
        for measured in results
        if measured.kind in ("prefill", "generate")
    ]
    save_results(known, adapter)
