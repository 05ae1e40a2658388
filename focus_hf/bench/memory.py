"""Peak memory of a prefill, each in a fresh process so that nothing earlier counts."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..attention import focus_attention
from .attention import dense_attention, random_problem
from .model import make_model
from .settings import Measurement, Setting


def bench_memory(setting: Setting, what: str = "attention") -> Measurement:
    """Peak bytes above an idle process: of attention alone with its inputs, or of a small model's prefill.

    Args:
        setting: what to run.
        what: ``"attention"`` or ``"model"``.
    """
    peaks = {name: _in_fresh_process(setting, what, name) for name in ("dense", "focus")}
    return Measurement(f"memory of {what}", setting, peaks["dense"], peaks["focus"], baseline="SDPA")


def _in_fresh_process(setting: Setting, what: str, name: str) -> int:
    request = json.dumps({"setting": asdict(setting), "what": what, "name": name})
    command = [sys.executable, "-m", "focus_hf.bench.memory"]
    done = subprocess.run(command, input=request, capture_output=True, text=True)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["killed, perhaps for want of memory"]
        raise RuntimeError(f"Measuring the memory of {setting.length} tokens failed: {last[0]}")
    return int(done.stdout)


@torch.no_grad()
def _measure(request: str) -> int:
    wanted = json.loads(request)
    setting = Setting(**wanted["setting"])
    prepare = _attention if wanted["what"] == "attention" else _model
    prepare(replace(setting, length=256), wanted["name"])()  # libraries take memory of their own at first use
    start = _in_use(setting.device)
    if setting.device.startswith("cuda"):
        prepare(setting, wanted["name"])()
        return torch.cuda.max_memory_allocated() - start
    over, seen = threading.Event(), [start]

    def watch() -> None:
        while not over.wait(0.0005):
            seen[0] = max(seen[0], _in_use(setting.device))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    prepare(setting, wanted["name"])()
    over.set()
    watcher.join()
    return max(seen[0], _in_use(setting.device)) - start


def _attention(setting: Setting, name: str) -> Any:
    problem = random_problem(setting)
    if name == "dense":
        return partial(dense_attention, problem.query, problem.key, problem.value)
    return partial(focus_attention, problem)


def _model(setting: Setting, name: str) -> Any:
    model = make_model(setting)
    ids = torch.randint(0, model.config.vocab_size, (1, setting.length), device=setting.device)

    def prefill() -> None:
        with model.disable_adapter() if name == "dense" else nullcontext():
            model(input_ids=ids, logits_to_keep=1)

    return prefill


def _in_use(device: str) -> int:
    if device.startswith("cuda"):
        return torch.cuda.memory_allocated()
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    print(_measure(sys.stdin.read()))
