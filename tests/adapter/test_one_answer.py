"""One answer about files: `check_adapter` and every loader accept and refuse the same folders, vLLM's among them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.utils import TaskType

from focus_hf.records import check_adapter
from focus_hf.settings import TASK_TYPES
from focus_hf.vllm.start import read_adapter
from tests.adapter.strangers import LOADERS, Attempt, edit_config, edit_weights, save_base_and_adapter

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    return save_base_and_adapter(tmp_path_factory.mktemp("origin"))


@pytest.fixture
def folders(origin, tmp_path):
    return origin[0], shutil.copytree(origin[1], tmp_path / "adapter")


def first(tensors: dict[str, torch.Tensor], kind: str) -> str:
    return next(name for name in sorted(tensors) if name.endswith(kind))


def put(kind: str, value: Any) -> Any:
    """An edit of a folder: the first tensor of a kind is given another value."""
    return lambda folder: edit_weights(folder, lambda t: t.update({first(t, kind): value(t[first(t, kind)])}))


def settings(**changes: Any) -> Any:
    return lambda folder: edit_config(folder, **changes)


def without(file: str) -> Any:
    return lambda folder: (folder / file).unlink()


def beside(file: str) -> Any:
    return lambda folder: (folder / file).write_bytes(b"\x80\x04")


REFUSED = {
    "too large for float32": put("focus_proj", lambda t: t.double() * 1e300),
    "NaN in float16": put("focus_balance", lambda t: t.half() * float("nan")),
    "another shape": put("focus_centroids", lambda t: torch.zeros(5, 16)),
    "another type": put("focus_proj", lambda t: t.int()),
    "another width": settings(hidden_size=64),
    "layers in another order": settings(layers=[2, 1, 0]),
    "a layer too many": settings(layers=[0, 1, 2, 3]),
    "no layers": settings(layers=None),
    "no width": settings(hidden_size=None),
    "a bad pattern": settings(target_modules="["),
    "a slow pattern": settings(target_modules="(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)\\1m\\2o"),
    "any pattern": settings(target_modules=".*self_attn"),
    "names of nothing": settings(target_modules=["mlp"]),
    "no names": settings(target_modules=[]),
    "a name too few": settings(target_modules=["0.self_attn", "1.self_attn"]),
    "all excluded": settings(exclude_modules=["self_attn"]),
    "an excluded pattern": settings(exclude_modules="*"),
    "another task": settings(task_type="NONSENSE"),
    "another routing": settings(routing="none"),
    "another type of adapter": settings(peft_type="NONE"),
    "no configuration": without("adapter_config.json"),
    "no weights": without(WEIGHTS),
    "a pickle beside the weights": beside("adapter_model.bin"),
}

ACCEPTED = {
    "as saved": lambda folder: None,
    "float64": put("focus_proj", lambda t: t.double()),
    "bfloat16": put("focus_centroids", lambda t: t.bfloat16()),
    "names": settings(target_modules=["self_attn"]),
    "whole names": settings(target_modules=[f"model.layers.{layer}.self_attn" for layer in range(3)]),
    "nothing excluded": settings(exclude_modules=[]),
    "another name excluded": settings(exclude_modules=["cross_attn"]),
    "a window of 2^29": settings(local_window=2**29),
    "a trainer's files": lambda folder: [beside(file)(folder) for file in ("training_args.bin", "optimizer.pt")],
    "fields of tomorrow": settings(fields_of_tomorrow={"a": [1]}),
}


def answers(base: Path, adapter: Path) -> dict[str, BaseException | None]:
    """Why each of those who open adapters refuses one; ``None`` where it does not."""
    found: dict[str, BaseException | None] = {loader: Attempt(loader, base, adapter).error for loader in LOADERS}
    for name, opens in (
        ("check_adapter", check_adapter),
        ("vLLM", lambda folder: read_adapter({"adapter": str(folder)})),
    ):
        found[name] = None
        try:
            opens(adapter)
        except ValueError as error:
            found[name] = error
    return found


@pytest.mark.parametrize("edit", REFUSED)
def test_refused_by_all(edit, folders):
    REFUSED[edit](folders[1])
    found = answers(*folders)
    assert all(found.values()), [name for name, error in found.items() if error is None]
    own = str(found["check_adapter"])
    assert own.isprintable() and len(own.replace(str(folders[1]), "")) < 300
    assert "adapter_config.json" in own or WEIGHTS in own or "adapter_model.bin" in own


@pytest.mark.parametrize("edit", ACCEPTED)
def test_accepted_by_all(edit, folders):
    ACCEPTED[edit](folders[1])
    assert not any(found := answers(*folders).values()), list(found)


def test_tasks_are_those_of_peft():
    assert set(TASK_TYPES) >= {task.value for task in TaskType}
