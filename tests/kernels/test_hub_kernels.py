"""The kernel repository: its modules are the package's, and what is built from it loads as a Hub's does."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.attention.triton_apart import run_apart

ROOT = Path(__file__).resolve().parents[2]

#: By `kernels.get_kernel`, or, where that is not installed, as it does it.
LOADED = """
import importlib.util, json, sys
import torch
from pathlib import Path
from focus_hf.attention.kernels import triton_gather

built = Path(sys.argv[1])
if importlib.util.find_spec("kernels") and importlib.util.find_spec("kernels").origin:
    from kernels import get_kernel

    kernel = get_kernel("focus-hf/focus-attention", version=0)
else:
    metadata = json.loads((built / "build/torch-cpu/metadata.json").read_text())
    spec = importlib.util.spec_from_file_location(metadata["id"], built / "build/torch-cpu/__init__.py")
    kernel = sys.modules[metadata["id"]] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernel)
torch.manual_seed(0)
query, (key, value) = torch.randn(1, 2, 1, 16), torch.randn(2, 1, 1, 30, 16)
groups, reads = torch.randint(8, (1, 1, 30), dtype=torch.uint8), torch.rand(1, 1, 1, 8, 2) < 0.5
call = (query, key, value, groups, reads, torch.tensor([[29]]))
how = {"scale": 0.25, "local_window": 4, "sink_tokens": 1}
same = torch.equal(kernel.sparse_decode(*call, **how), triton_gather.sparse_decode(*call, **how))
print(json.dumps([same, sorted(kernel.__all__), kernel.__file__]))
"""


@pytest.fixture(scope="module")
def builder():
    spec = importlib.util.spec_from_file_location("build_kernels", ROOT / "kernels" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_repository_holds_what_kernel_builder_wants(builder, tmp_path):
    builder.build(tmp_path, "cuda")
    assert {path.name for path in (tmp_path / builder.EXTENSION).iterdir()} == {*builder.MODULES, "__init__.py"}
    assert all((tmp_path / name).is_file() for name in ("README.md", "build.toml", "flake.nix"))


def test_its_modules_know_nothing_of_the_package(builder):
    for name in builder.MODULES:
        assert "from .." not in (builder.SOURCE / name).read_text()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_what_is_built_loads_and_computes_the_same(builder, tmp_path, monkeypatch):
    variant = builder.build(tmp_path, "cpu")
    monkeypatch.setenv("LOCAL_KERNELS", f"focus-hf/focus-attention={tmp_path}")
    script = f"import sys; sys.argv = ['', {str(tmp_path)!r}]\n{LOADED}"
    same, names, path = run_apart(script, TRITON_INTERPRET="1")
    assert same and names == ["PromptTokens", "cell_reads", "key_groups", "sparse_decode", "sparse_prompt"]
    assert Path(path).parent == variant
