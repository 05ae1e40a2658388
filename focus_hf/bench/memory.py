"""Peak memory of a prefill, each in a fresh process so that nothing earlier counts."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from ..attention import focus_attention
from .attention import random_problem
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
    watch = _PeakWatch(setting.device)
    prepare(setting, wanted["name"])()
    return watch.peak()


def _attention(setting: Setting, name: str) -> Any:
    problem = random_problem(setting)
    if name == "dense":
        query, key, value = problem.query, problem.key, problem.value
        grouped_queries = setting.heads != setting.kv_heads
        return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped_queries)
    return lambda: focus_attention(problem)


def _model(setting: Setting, name: str) -> Any:
    model = make_model(setting)
    ids = torch.randint(0, model.config.vocab_size, (1, setting.length), device=setting.device)
    if name == "focus":
        return lambda: model(input_ids=ids, logits_to_keep=1)

    def dense() -> None:
        with model.disable_adapter():
            model(input_ids=ids, logits_to_keep=1)

    return dense


class _PeakWatch:
    """Peak memory since its creation, above what was in use then."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._start = self._highest = _in_use(device)
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        while not self._over.wait(0.0005):
            self._highest = max(self._highest, _in_use(self._device))

    def peak(self) -> int:
        self._over.set()
        self._watcher.join()
        if self._device.startswith("cuda"):
            return torch.cuda.max_memory_allocated() - self._start
        return max(self._highest, _in_use(self._device)) - self._start


def _in_use(device: str) -> int:
    if device.startswith("cuda"):
        return torch.cuda.memory_allocated()
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    print(_measure(sys.stdin.read()))
