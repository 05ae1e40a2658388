"""Heads split over processes (transformers' ``tp_plan``): each gets what one process gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from focus_hf.adapter.heads import classes_of_part

from focus_hf.adapter.save import save_adapter
from focus_hf.attention import HeadClass, Pattern
from tests.adapter.split_worker import found, load
from tests.adapter.test_heads import heads_model
from tests.families import base_model, focus_model

WORKER = Path(__file__).with_name("split_worker.py")

WINDOW, FAR = Pattern(8), Pattern(16)


@pytest.mark.slow
def test_two_processes_generate_what_one_does(tmp_path: Path) -> None:
    """Shared routing, routing per head, and shared routing with heads that attend in different ways."""
    base_model("llama").save_pretrained(tmp_path / "base")
    save_adapter(focus_model("llama"), tmp_path / "shared")
    save_adapter(heads_model("llama", "per_head"), tmp_path / "per_head")
    save_adapter(heads_model("llama", "shared"), tmp_path / "mixed")
    adapters = ["shared", "per_head", "mixed"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"),
            *(str(WORKER), str(tmp_path), *adapters),
        ],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join([str(WORKER.parents[2]), os.environ.get("PYTHONPATH", "")]),
        },
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[:5000]
    expected = found(load(tmp_path, adapters), adapters)
    assert len({json.dumps(one["greedy"]) for one in expected.values()}) == len(adapters)  # adapters differ
    for rank in range(2):
        result = json.loads((tmp_path / f"{rank}.json").read_text())
        assert result["heads"] == 1  # of two key/value heads
        for name, one in expected.items():
            split = result["adapters"][name]
            assert split["greedy"] == one["greedy"] and split["beams"] == one["beams"]
            for kind in ("logits", "gradients"):
                for ours, its in zip(split[kind], one[kind], strict=True):
                    torch.testing.assert_close(torch.tensor(ours), torch.tensor(its), rtol=1e-3, atol=1e-3)
        assert len(result["adapters"]["shared"]["gradients"]) == 6 and "cannot be observed" in result["refused"]


def test_each_process_takes_the_classes_of_its_own_heads() -> None:
    groups = HeadClass((0, 2, 3), FAR, (slice(0, 4), slice(4, 8), slice(8, 12)), top_k=2)
    classes = (groups, HeadClass((1, 4, 5), WINDOW))
    assert classes_of_part(classes, 6, None) == classes
    assert classes_of_part(classes, 2, (0, 3)) == (
        HeadClass((0,), FAR, (slice(0, 4),), top_k=2),
        HeadClass((1,), WINDOW),
    )
    assert classes_of_part(classes, 2, (1, 3)) == (HeadClass((0, 1), FAR, (slice(4, 8), slice(8, 12)), top_k=2),)
    assert classes_of_part(classes, 2, (2, 3)) == (HeadClass((0, 1), WINDOW),)
    shared = (HeadClass((0, 3), FAR, (slice(0, 4),)), HeadClass((1, 2), WINDOW))  # one slice for all of them
    assert classes_of_part(shared, 2, (1, 2)) == (HeadClass((1,), FAR, (slice(0, 4),)), HeadClass((0,), WINDOW))


@pytest.mark.parametrize(("heads", "part"), [(3, None), (2, (0, 2)), (4, (1, 2))])
def test_unknown_splits_are_refused(heads: int, part: tuple[int, int] | None) -> None:
    with pytest.raises(ValueError, match=f"has {heads} of a layer's 6 key/value heads, and it is not known which"):
        classes_of_part((HeadClass((0, 1, 2), FAR), HeadClass((3, 4, 5), WINDOW)), heads, part)
