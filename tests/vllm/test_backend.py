"""vLLM's backend, around a stand-in for vLLM, against the definition: chunks, shuffled blocks, single tokens."""

from __future__ import annotations

import importlib
import random
import sys
from contextlib import nullcontext
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from focus_hf.attention import Pattern, Problem, Scores, WhoAttends, native
from focus_hf.attention.definition import by_memberships
from focus_hf.attention.masked import masked_focus_attention
from focus_hf.routing.cells import CellRouter, cell_limits, cell_reads, key_groups
from focus_hf.routing.shared import group_scores
from focus_hf.vllm.router import CellsRouter, NoRouter, Rotary, SharedRouter
from focus_hf.vllm.slots import padded_page
from studies.launches.counting import LaunchCounter
from tests.families import CELLS, EACH, focus_config

HEADS, KV_HEADS, DIM, WIDTH, BLOCK, BLOCKS = 4, 2, 8, 16, 16, 40
WINDOW, SINKS, GROUPS = 8, 2, 4

#: New tokens of each request in each step; then single tokens of all.
STEPS = ((20, 0, 33), (1, 37, 5), (14, 1, 1), (1, 1, 1), (1, 1, 1))

#: Launches of the kernel, which a stand-in computes here.
KERNELS = 3

KINDS = ("cells", "each", "shared", "two-groups", "none")


@pytest.fixture(scope="module")
def backend() -> Any:
    """`focus_hf.vllm.backend`, with what it needs of vLLM."""
    value = TypeVar("value")

    class Builder(Generic[value]):
        def __init__(self, *arguments: Any) -> None:
            pass

    class Impl(Generic[value]):
        pass

    classes = {"AttentionBackend": object, "AttentionImpl": Impl, "AttentionMetadataBuilder": Builder}
    made = {"attention.backend": {**classes, "CommonAttentionMetadata": object}}
    made["kv_cache_layout"] = {"KVCacheLayout": Enum("KVCacheLayout", "LBNHC")}
    with pytest.MonkeyPatch.context() as patch:
        for path, names in made.items():
            parts = ["vllm", "v1", *path.split(".")]
            for length in range(1, len(parts) + 1):
                name = ".".join(parts[:length])
                patch.setitem(sys.modules, name, sys.modules.get(name) or ModuleType(name))
            vars(sys.modules[name]).update(names)
        patch.delitem(sys.modules, "focus_hf.vllm.backend", raising=False)
        yield importlib.import_module("focus_hf.vllm.backend")
    sys.modules.pop("focus_hf.vllm.backend", None)


def turned(keys: Tensor, angles: Tensor) -> Tensor:
    """Keys ``(H_kv, S, D)`` with positions applied, to the first numbers of each head."""
    cos, sin = angles.cos(), angles.sin()
    one, other, rest = keys.split([angles.shape[1], angles.shape[1], DIM - 2 * angles.shape[1]], dim=-1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin, rest], dim=-1)


class Case:
    """Three requests of random tokens, and what they give by the definition."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.kind, self.lengths = kind, [sum(of) for of in zip(*STEPS, strict=True)]
        angles = torch.rand(128, 3) * 6
        self.by_cells = {"cells": CELLS, "each": EACH}.get(kind)
        self.pattern = Pattern(WINDOW, SINKS, 0, CELLS["num_bands"] if self.by_cells else 1)
        self.config = focus_config(**(self.by_cells or {"top_k": 1 + (kind == "two-groups")}))
        bands, choosers = CELLS["num_bands"], HEADS if kind == "each" else KV_HEADS
        width = HEADS // choosers * DIM
        self.cells = CellRouter(
            *(torch.randn(KV_HEADS, *size) for size in ((4, DIM), (GROUPS, 4), (GROUPS,))),
            torch.randn(choosers, 4, width),
            *(torch.randn(choosers, *size) * 0.3 for size in ((bands + 1, width), (GROUPS * bands + 1,), ())),
        )
        sizes = {"focus_proj": (4, WIDTH), "focus_centroids": (GROUPS, 4), "focus_balance": (GROUPS,)}
        self.shared = {name: torch.randn(*size) for name, size in sizes.items()}
        if self.by_cells:
            table = torch.cat([angles.cos(), angles.sin()], dim=-1)
            self.router: Any = CellsRouter(self.config, self.cells, Rotary(table, True, DIM))
        elif kind == "none":
            self.router = NoRouter()
        else:
            self.router = SharedRouter(self.config, self.shared)
        self.hidden = [torch.randn(length, WIDTH) for length in self.lengths]
        self.queries = [torch.randn(HEADS, length, DIM) for length in self.lengths]
        self.plain = [torch.randn(KV_HEADS, length, DIM) for length in self.lengths]
        self.keys = [turned(keys, angles[: keys.shape[1]]) for keys in self.plain]
        self.values = [torch.randn(KV_HEADS, length, DIM) for length in self.lengths]

    def expected(self, request: int) -> Tensor:
        """``(S, H, D)``."""
        length, query = self.lengths[request], self.queries[request][None]
        positions, pattern = torch.arange(length)[None], self.pattern
        if self.by_cells:
            groups = key_groups(self.plain[request][None], self.cells)
            limits = cell_limits(positions, self.config.threshold, WINDOW, self.cells.num_bands)
            reads = cell_reads(query, self.cells, limits)
        elif self.kind == "none":
            pattern, groups = self.router.pattern, torch.zeros(1, 1, length, dtype=torch.uint8)
            reads = torch.zeros(1, 1, length, 1, 1, dtype=torch.bool)
        else:
            scores = group_scores(self.hidden[request][None], *list(self.shared.values())[:2], self.config.temperature)
            best = (scores + self.shared["focus_balance"]).topk(self.config.top_k).indices
            groups, reads = by_memberships(torch.zeros(scores.shape, dtype=torch.bool).scatter(-1, best, True), length)
        groups = groups.expand(-1, KV_HEADS, -1)
        reads = reads.expand(-1, max(KV_HEADS, reads.shape[1]), -1, -1, -1)
        assert self.kind == "none" or 0.1 < reads.float().mean() < 0.9
        who = WhoAttends(pattern, positions, groups, reads)
        found = masked_focus_attention(
            Problem(query, self.keys[request][None], self.values[request][None], who, Scores(DIM**-0.5))
        )
        return found[0].transpose(0, 1)


def pages(kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """A layer's cache as vLLM lays it out, ``(blocks, H_kv, block_size, 2 D)``, its pages filled up."""
    length = KV_HEADS * BLOCK * 2 * DIM * dtype.itemsize
    page = length if kind == "none" else padded_page(length, BLOCK, KV_HEADS)
    raw = torch.zeros(3 * page + BLOCKS * page, dtype=torch.int8)[3 * page :].view(dtype)
    strides = (page // dtype.itemsize, 2 * DIM, KV_HEADS * 2 * DIM, 1)
    return raw.as_strided((BLOCKS, KV_HEADS, BLOCK, 2 * DIM), strides, raw.storage_offset())


def walk(backend: Any, case: Case, counters: list[LaunchCounter] | None = None) -> None:
    """All steps of all requests, held to what is expected."""
    impl = backend.FocusImpl(HEADS, DIM, DIM**-0.5, KV_HEADS)
    impl.router = case.router
    cache, done = pages(case.kind), [0, 0, 0]
    builder = backend.FocusMetadataBuilder(SimpleNamespace(block_size=BLOCK), [], None, torch.device("cpu"))
    blocks = torch.tensor(random.Random(0).sample(range(1, BLOCKS), 18), dtype=torch.int32).view(3, 6)
    expected = [case.expected(request) for request in range(3)]
    for step in STEPS:
        order = sorted((request for request in range(3) if step[request]), key=lambda request: step[request] > 1)
        spans = [(request, done[request], done[request] + step[request]) for request in order]
        edges = torch.tensor([0, *(step[request] for request in order)]).cumsum(0).int()
        slots = [blocks[r, i // BLOCK] * BLOCK + i % BLOCK for r, start, end in spans for i in range(start, end)]
        common = SimpleNamespace(
            num_reqs=len(order),
            query_start_loc_cpu=edges,
            seq_lens=torch.tensor([end for _, _, end in spans]),
            block_table_tensor=blocks[order],
            slot_mapping=torch.tensor(slots),
        )
        metadata = builder.build(0, common)
        rows = [torch.cat([x[r][:, a:b] for r, a, b in spans], dim=1).transpose(0, 1) for x in case_tensors(case)]
        hidden = torch.cat([case.hidden[r][a:b] for r, a, b in spans])
        hidden = torch.cat([hidden, hidden[:2]])
        padded = [torch.cat([x, torch.full_like(x[:2], torch.nan)]) for x in rows]  # vLLM may fill up a step
        output = torch.full_like(padded[0], 7.0)
        for layer in range(2):  # the first makes what all have in common
            impl.hidden_states, counter = hidden, LaunchCounter()
            with counter if layer else nullcontext():
                impl.forward(torch.nn.Identity(), *padded, cache, metadata, output)
        if counters is not None:
            counters.append(counter)
        for (r, a, b), start in zip(spans, edges.tolist(), strict=False):
            torch.testing.assert_close(output[start : start + b - a], expected[r][a:b], rtol=1e-4, atol=1e-5)
            done[r] = b


def case_tensors(case: Case) -> tuple[list[Tensor], ...]:
    return case.queries, case.keys, case.values


@pytest.mark.parametrize("kind", KINDS)
def test_steps_give_what_the_definition_gives(backend, kind):
    walk(backend, Case(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_single_tokens_are_read_in_place(backend, kind, monkeypatch):
    """By the kernel's contract; and a layer asks little of a device, and waits for nothing."""
    counters: list[LaunchCounter] = []
    calls = []

    def decode(query, key, value, groups, reads, places, table, pattern, scores):  # type: ignore
        calls.append(len(query))
        assert reads.stride()[-2:] == (reads.shape[-1], 1) and value.stride(-1) == key.stride(-1) == 1
        assert groups.dtype == torch.uint8 and groups.shape == key.shape[:3] == value.shape[:3]
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return _decode(query, key, value, groups, reads, places, table, pattern, scores)

    monkeypatch.setattr(backend, "decode_in_place", decode)
    monkeypatch.setattr(backend, "reads_in_place", lambda *_: True)
    monkeypatch.setattr(native, "is_native", lambda *_: False)  # few tokens are routed by plain operations elsewhere
    walk(backend, Case(kind), counters)
    assert calls == [1, 1, 2, 2, 3, 3, 3, 3]
    for counter in counters[-2:]:  # steps of single tokens alone
        assert not counter.syncs, counter.syncs
        assert sum(counter.operations.values()) + KERNELS <= 20, counter.operations


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_read_in_place(backend, kind, monkeypatch):
    """By the kernel's contract: those of a step in one call, and no layer but a step's first waits for a device."""
    counters: list[LaunchCounter] = []
    calls = []

    def prompts(query, key, value, groups, reads, tokens, pattern, scores):  # type: ignore
        table, size, lengths, starts, most = tokens
        assert size == BLOCK and reads.stride()[-2:] == (reads.shape[-1], 1)
        calls.append(len(lengths))
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            assert query.shape[2] == reads.shape[2] == starts[-1] and most == starts.diff().max()
            positions = [torch.arange(n - new, n) for n, new in zip(lengths.tolist(), starts.diff(), strict=True)]
            rows = table.repeat_interleave(starts.diff(), dim=0)
            own, read = (x[0].transpose(0, 1)[:, :, None] for x in (query, reads))
            found = _decode(own, key, value, groups, read, torch.cat(positions), rows, pattern, scores)
            return found.transpose(0, 2)

    def decode(*arguments):  # type: ignore
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return _decode(*arguments)

    for name in ("reads_in_place", "reads_prompts_in_place"):
        monkeypatch.setattr(backend, name, lambda *_: True)
    monkeypatch.setattr(backend, "decode_in_place", decode)
    monkeypatch.setattr(backend, "prompts_in_place", prompts)
    monkeypatch.setattr(backend, "prompt_tokens", lambda *arguments: arguments)
    walk(backend, Case(kind), counters)
    assert calls == [2, 2, 2, 2, 1, 1]
    for counter in counters:
        assert not counter.syncs, counter.syncs


def _decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    groups: Tensor,
    reads: Tensor,
    places: Tensor,
    table: Tensor,
    pattern: Pattern,
    scores: Scores,
) -> Tensor:
    outputs = []
    for row, place in enumerate(places.tolist()):
        blocks = table[row, : place // BLOCK + 1].long()
        keys, values, own = (x[blocks].transpose(0, 1).flatten(1, 2)[:, : place + 1] for x in (key, value, groups))
        who = WhoAttends(pattern, torch.arange(place + 1)[None], own[None], reads[row : row + 1])
        outputs.append(masked_focus_attention(Problem(query[row : row + 1], keys[None], values[None], who, scores)))
    return torch.cat(outputs)
