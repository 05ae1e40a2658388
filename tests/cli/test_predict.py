"""`focus-hf bench --what predict`: what a prediction is made of, against what is counted and computed."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from focus_hf.attention import Known, Problem, Scores, WhoAttends, focus_attention
from focus_hf.bench import Setting, bench_launches, bench_predict
from focus_hf.bench.devices import DEVICES, HERE, Device
from focus_hf.bench.predict import BY_GROUPS, PLAIN, keys_read, prefill_limit, seconds, works
from focus_hf.bench.report import tables, to_markdown
from focus_hf.bench.stand_in import FlashStandIn
from focus_hf.bench.work import Work, pairs_in_blocks
from tests.cli.test_cli import focus_hf as run

LLAMA = Setting(4096, heads=32, kv_heads=8, head_dim=128, dtype="bfloat16")


@pytest.mark.parametrize("top_left", [True, False])
@pytest.mark.parametrize(("queries", "keys", "left"), [(50, 50, None), (50, 50, 9), (33, 90, None), (20, 61, 7)])
def test_blocks_that_have_a_pair_are_computed_whole(queries, keys, left, top_left):
    i, j = torch.arange(queries)[:, None] + (0 if top_left else keys - queries), torch.arange(keys)[None]
    attended = (j <= i) & (torch.tensor(True) if left is None else i - j <= left)
    expected = 0
    for some in attended.split(16):
        for block in some.split(8, dim=1):
            expected += block.numel() if block.any() else 0
    found = pairs_in_blocks(queries, keys, left, causal=True, block=(16, 8), top_left=top_left)
    assert found == expected
    assert pairs_in_blocks(queries, keys, left, causal=False) == queries * keys


class Rows(FlashStandIn):
    """Keeps the rows of every call."""

    def __init__(self):
        self.seen = []

    def _varlen_forward(self, q, k, v, call, window):
        self.seen.append((q.shape, v.shape[2], call.rows.cu_queries.diff(), call.rows.cu_keys.diff(), window[0]))
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[2]), q.new_zeros(q.shape[1], q.shape[0])


@pytest.mark.parametrize("top_k", [1, 2])
def test_products_are_those_of_the_rows_that_a_plan_makes(top_k):
    """Recorded from fake tensors, whose rows are taken to be even, against the rows of real ones."""
    setting = dataclasses.replace(LLAMA, top_k=top_k)
    recorded = [
        work.flops for work in works(setting, "prefill", "grouped", 1, on_cpu=False)[1] if "varlen" in work.name
    ]
    kernel, each = Rows(), setting.num_groups
    memberships = torch.rand(1, setting.length, each).argsort(-1) < top_k
    query = torch.zeros(1, 32, setting.length, 128, dtype=torch.bfloat16)
    who = WhoAttends(
        setting.pattern, torch.arange(setting.length)[None], memberships, known=Known(top_k, unpadded=True)
    )
    focus_attention(Problem(query, query[:, :8], query[:, :8], who, Scores(0.1)), path="grouped", kernel=kernel)
    expected = []
    for (_, heads, width), value_width, queries, keys, left in kernel.seen:
        pairs = sum(
            pairs_in_blocks(q, k, None if left < 0 else left, causal=True)
            for q, k in zip(queries.tolist(), keys.tolist(), strict=True)
        )
        expected.append(2.0 * pairs * heads * (width + value_width))
    assert len(recorded) == len(expected) == 2
    assert recorded == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("top_k", [1, 2])
def test_as_many_operations_as_a_layer_launches_more(top_k):
    setting = Setting(256, top_k=top_k, local_window=16)
    counted = {(row.phase, row.path): row for row in bench_launches(setting, batches=(2,)) if row.routing == "shared"}
    for phase, path, name in (
        ("prefill", "grouped", "grouped, torch-flash"),
        ("decode", PLAIN, "plain cache, auto, cpu-flash"),
    ):
        row = counted[phase, name]
        dense, focus = works(setting, phase, path, 2, on_cpu=False)
        assert len(dense) == 1
        more = row.focus[2] - row.dense[2]
        assert len(focus) - 1 == pytest.approx(more, abs=0.15 * more + 2)  # the cache and its memberships are not here


def test_times_are_rooflines():
    device = Device(
        "d", flops=1e12, bandwidth=1e11, processors=10, launch=1e-5, kernel=1e-6, attention=0.5, memory=0.5
    )
    moving, multiplying, small = Work("m", 5e9), Work("a", 0.0, 1e12, blocks=15), Work("s", 1.0)
    assert moving.seconds(device) == pytest.approx(0.1)
    assert multiplying.seconds(device) == pytest.approx(2.0 * 20 / 15)  # two rounds of ten, for fifteen
    assert small.seconds(device) == 1e-6
    assert seconds([small] * 100, device) == pytest.approx(1e-3)  # the host is behind
    assert seconds([small] * 100, dataclasses.replace(device, overlaps=False)) == pytest.approx(1.1e-3)


def test_what_is_predicted_is_within_what_skipping_pairs_can_give():
    for length, least in ((1024, 0.0), (2**20, 0.85)):
        for top_k in (1, 2):
            setting = dataclasses.replace(LLAMA, length=length, top_k=top_k)
            for found in bench_predict(setting, ["H100"], batches=(1, 64)):
                assert list(found.ratio) == [1, 64] and not found.measured
                assert all(ratio <= found.recorded[batch] * 1.001 for batch, ratio in found.ratio.items())
                assert all(ratio < found.limit for ratio in found.recorded.values())
                if found.phase == "prefill":
                    assert all(ratio > least * found.limit for ratio in found.ratio.values())
                if found.path == PLAIN:
                    assert all(ratio < 1 for ratio in found.ratio.values())  # every key is read
    assert prefill_limit(LLAMA) == pytest.approx(5.53, abs=0.05)  # as counted: docs/benchmarks.md
    assert 4096 / keys_read(LLAMA) == pytest.approx(6.52, abs=0.05)


def test_the_command_says_that_it_predicts(tmp_path):
    result = run(
        *("bench", "--what", "predict", "--lengths", "1024", "--batches", "1,8", "--on", "A100,B200", "--json"),
        *("--markdown", str(tmp_path / "p.md")),
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)["results"]
    assert [row["kind"] for row in rows] == ["prediction: prefill", "prediction: decode", "prediction: decode"] * 2
    assert {row["dtype"] for row in rows} == {"bfloat16"} and list(rows[0]["predicted_ratio"]) == ["1", "8"]
    assert rows[0]["device"]["source"] == DEVICES["A100"].source and rows[0]["measured"] == {}
    assert (tmp_path / "p.md").read_text().startswith("Predictions, not measurements")


def test_the_device_that_is_here_is_measured_beside():
    found = list(
        bench_predict(Setting(512, local_window=16, heads=2, kv_heads=2, head_dim=16), [HERE], batches=(1, 2))
    )
    assert [(p.path, sorted(p.measured)) for p in found] == [
        ("cheapest path", [1, 2]),
        (PLAIN, [1, 2]),
        (BY_GROUPS, [1]),
    ]
    assert all(ratio > 0 for p in found for ratio in p.measured.values())
    assert found[0].device.flops > 1e8 and "measured in this run" in found[0].device.source
    assert "Predictions" in str(tables(found, 200)[0].title) and "| this CPU |" in to_markdown(found)
