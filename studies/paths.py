"""Which way to compute attention is the faster: what `focus_hf.attention.paths` takes first, measured.

    python -m studies.paths [threads]

Each way takes turns with attention under a mask, which needs no path; it pays from the first length at which it is
faster there and at every longer one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from focus_hf.attention import Pattern, Problem, WhoAttends, focus_attention
from focus_hf.bench import Setting
from focus_hf.bench.attention import random_problem
from focus_hf.bench.timing import interleaved
from focus_hf.machine import environment, summary

LENGTHS = (256, 512, 1024, 2048, 4096)

#: Of routing by cells: groups, bands of distance, and the share of cells that a query reads.
GROUPS, BANDS, SHARE = 64, 4, 0.15

#: Of a query's cells, that the next one reads, too: sixteen queries in a row read 2.4 times what each of them does.
KEPT = 0.89


@torch.no_grad()
def bench_paths(lengths: Sequence[int] = LENGTHS, seconds: float = 2.0) -> dict[str, dict[int, float]]:
    """How many times faster than under a mask each way is, by what it is of and length."""
    found: dict[str, dict[int, float]] = {}
    for length in lengths:
        setting = Setting(length, heads=9, kv_heads=3)
        cells, shared = by_cells(random_problem(setting)), random_problem(setting)
        last = replace(cells, query=cells.query[:, :, -1:], who=replace(cells.who, reads=cells.who.reads[:, :, -1:]))
        problems = {
            "a token": (last, ("native",)),
            "cells": (cells, ("native",)),
            "shared": (shared, ("grouped", "native")),
        }
        for what, (problem, paths) in problems.items():
            times = interleaved(
                {path: partial(focus_attention, problem, path=path) for path in ("masked", *paths)}, "cpu", seconds
            )
            for path in paths:
                found.setdefault(f"{what}, {path}", {})[length] = times["masked"] / times[path]
    return found


def by_cells(problem: Problem) -> Problem:
    """The same tensors with routing by cells: any groups, and reads that last for some queries."""
    generator = torch.Generator().manual_seed(0)
    kv_heads, length = problem.key.shape[1:3]
    groups = torch.randint(GROUPS, (1, kv_heads, length), generator=generator).to(torch.uint8)
    reads = persistent_reads(kv_heads, length, generator)
    pattern = Pattern(problem.who.pattern.local_window, problem.who.pattern.sink_tokens, num_bands=BANDS)
    who = WhoAttends(pattern, problem.who.positions, groups, reads, first_position=0)
    return replace(problem, who=who)


def persistent_reads(kv_heads: int, num_queries: int, generator: torch.Generator) -> Tensor:
    """bool ``(1, H_kv, Q, K, bands)``: a cell that is read is read by the next query with the chance `KEPT`."""
    opens = SHARE * (1 - KEPT) / (1 - SHARE)
    chance = torch.rand(num_queries, kv_heads, GROUPS, BANDS, generator=generator)
    now = chance[0] < SHARE
    reads = [now]
    for some in chance[1:]:
        now = torch.where(now, some < KEPT, some < opens)
        reads.append(now)
    return torch.stack(reads, dim=1)[None]


def pays_from(ratios: dict[int, float]) -> int | None:
    """The length from which on every ratio is above 1."""
    lengths = sorted(ratios)
    return next((n for n in lengths if all(ratios[m] > 1 for m in lengths if m >= n)), None)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    measured = bench_paths()
    for path, ratios in measured.items():
        print(f"{path}: pays from {pays_from(ratios)};", {n: round(ratio, 2) for n, ratio in ratios.items()})
    print(summary(environment()))
