"""Timing of several functions in one interleaved run, so that a machine's moods hit all of them alike."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from torch.profiler import profile

# The profiler's own log lines would stand between the results.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

#: Steps of Focus attention, as the profiler sees them.
STEPS = ("plan", "gather", "groups", "window", "merge")


def interleaved(
    functions: Mapping[str, Callable[[], Any]],
    device: str,
    seconds: float,
    least: int = 5,
    most: int = 50,
    warm_up: bool = True,
) -> dict[str, float]:
    """Median milliseconds of each function; they take turns until the time is used up.

    Args:
        functions: by name.
        device: synchronised around each call.
        seconds: time to spend, at least ``least`` rounds.
        least, most: bounds on the number of rounds.
        warm_up: a first round is not counted.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values() if warm_up else ():  # compile, allocate
        function()
    begin = time.perf_counter()
    for number in range(most):
        if number >= least and time.perf_counter() - begin > seconds:
            break
        for name, function in functions.items():
            _synchronise(device)
            start = time.perf_counter()
            function()
            _synchronise(device)
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: median(values) for name, values in times.items()}


def step_shares(function: Callable[[], Any], repeats: int = 3) -> dict[str, float]:
    """Share of a function's time in the steps of Focus attention; what is left is overhead."""
    with profile() as profiler:
        start = time.perf_counter()
        for _ in range(repeats):
            function()
        total = (time.perf_counter() - start) * 1e6
    spent = {event.key: max(event.cpu_time_total, event.device_time_total) for event in profiler.key_averages()}
    return {step: round(spent[f"focus: {step}"] / total, 3) for step in STEPS if f"focus: {step}" in spent}


def _synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
