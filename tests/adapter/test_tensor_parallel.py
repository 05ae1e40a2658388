"""Heads split over processes (transformers' ``tp_plan``): each gets what one process gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from focus_hf.adapter import focus_layers, routers
from focus_hf.adapter.routers import own_heads
from focus_hf.adapter.save import save_adapter
from tests.adapter.split_worker import found, load
from tests.families import CELLS, EACH, base_model, focus_model

WORKER = Path(__file__).with_name("split_worker.py")


@pytest.mark.slow
def test_two_processes_generate_what_one_does(tmp_path: Path) -> None:
    base_model("llama").save_pretrained(tmp_path / "base")
    save_adapter(focus_model("llama"), tmp_path / "shared")
    save_adapter(focus_model("llama", **CELLS), tmp_path / "cells")
    adapters = ["shared", "cells"]
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
        assert len(result["adapters"]["shared"]["gradients"]) == 6


@pytest.mark.parametrize("routing", [CELLS, EACH], ids=["together", "each"])
@pytest.mark.parametrize("rank", [0, 1])
def test_each_process_takes_the_tensors_of_its_own_heads(rank: int, routing: Any, monkeypatch: Any) -> None:
    layer = focus_layers(focus_model("llama", **routing))[0]
    call, whole = SimpleNamespace(router=layer, adapter="default"), layer.cell_router("default")
    assert own_heads(call, 2) is whole
    with pytest.raises(ValueError, match="has 1 of a layer's 2 key/value heads, and it is not known which"):
        own_heads(call, 1)
    parts = SimpleNamespace(size=lambda: 2, get_local_rank=lambda: rank)
    monkeypatch.setattr(routers, "split_over", lambda module: parts)
    own = own_heads(call, 1)
    for name, tensor in vars(own).items():
        assert torch.equal(tensor, getattr(whole, name).chunk(2)[rank])
    with pytest.raises(ValueError, match="has 3 of a layer's 2 key/value heads"):
        own_heads(call, 3)
