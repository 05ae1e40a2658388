"""What is refused before an engine starts, without vLLM: one line that says what to change."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from focus_hf.adapter.save import save_adapter
from focus_hf.vllm.start import check_engine, prepare_arguments, read_adapter
from tests.families import focus_model

WEIGHTS = "adapter_model.safetensors"


def engine(**changes: Any) -> SimpleNamespace:
    """What `check_engine` reads of vLLM's configuration, for the model of `tests.families`."""
    text = SimpleNamespace(hidden_size=32, num_hidden_layers=3, layer_types=None)
    values = {
        "model": "org/base",
        "hf_config": SimpleNamespace(is_encoder_decoder=False),
        "hf_text_config": text,
        "use_mla": False,
        "architectures": ["LlamaForCausalLM"],
        "runner_type": "generate",
        "get_total_num_kv_heads": lambda: 2,
        "get_sliding_window": lambda: None,
    }
    for name in ("hidden_size", "num_hidden_layers", "layer_types"):
        if name in changes:
            setattr(text, name, changes.pop(name))
    model = SimpleNamespace(**{**values, **{name: changes.pop(name) for name in list(changes) if name in values}})
    sizes = ("tensor_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size")
    return SimpleNamespace(
        model_config=model,
        compilation_config=SimpleNamespace(mode=changes.get("mode", 0)),
        speculative_config=changes.get("speculative_config"),
        cache_config=SimpleNamespace(cache_dtype=changes.get("cache_dtype", "auto")),
        kv_transfer_config=changes.get("kv_transfer_config"),
        parallel_config=SimpleNamespace(**{name: changes.get(name, 1) for name in sizes}),
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of a shared adapter, and of one that routes by cells and has a dial."""
    folder = tmp_path_factory.mktemp("saved")
    curves = {"256": [[-2.0, 0.1], [-8.0, 0.9]]}
    return {
        "shared": save_adapter(focus_model("llama"), folder / "shared"),
        "cells": save_adapter(focus_model("llama", routing="cells", pairs_curves=curves), folder / "cells"),
    }


def test_only_what_needs_hidden_states_is_not_compiled(saved):
    arguments = SimpleNamespace(enforce_eager=False, additional_config={})
    adapter = prepare_arguments(arguments, {"adapter": str(saved["cells"])})
    assert arguments.enforce_eager is False
    check_engine(engine(mode=3), adapter)
    with pytest.raises(ValueError, match="--enforce-eager") as error:
        check_engine(engine(mode=3), read_adapter({"adapter": str(saved["shared"])}))
    assert "\n" not in str(error.value)


def test_a_sound_adapter_is_read(saved):
    wanted = {"adapter": str(saved["shared"])}
    arguments = SimpleNamespace(enforce_eager=False, additional_config={"focus": wanted, "other": 1})
    adapter = prepare_arguments(arguments, wanted)
    assert arguments.enforce_eager is True and arguments.additional_config == {"focus": wanted, "other": 1}
    check_engine(engine(), adapter)
    tensors = adapter.tensors()
    own = load_file(saved["shared"] / WEIGHTS)
    assert sorted(tensors) == [0, 1, 2]
    for layer, kinds in tensors.items():
        for kind, tensor in kinds.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.group_router.{kind}"
            assert torch.equal(own.pop(name), tensor)
    assert not own


def test_dials(saved):
    assert read_adapter({"adapter": str(saved["shared"]), "top_k": 3}).config.top_k == 3
    assert read_adapter({"adapter": str(saved["cells"]), "pairs": 0.5}).config.pairs == 0.5
    assert read_adapter({"adapter": str(saved["cells"]), "threshold": -5}).config.threshold == -5


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"speculative_config": object()}, "speculative"),
        ({"cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
        ({"kv_transfer_config": object()}, "--kv-transfer-config"),
        ({"decode_context_parallel_size": 2}, "context parallelism"),
        ({"tensor_parallel_size": 4}, "2 key/value heads cannot be split over 4 devices"),
        ({"use_mla": True}, "MLA"),
        ({"hf_config": SimpleNamespace(is_encoder_decoder=True)}, "encoder and a decoder"),
        ({"architectures": ["Gemma2ForCausalLM"]}, "Gemma2ForCausalLM"),
        ({"runner_type": "pooling"}, "run to pooling"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding window"),
        ({"get_sliding_window": lambda: 4096}, "sliding window"),
        ({"hidden_size": 64}, "width 32"),
        ({"num_hidden_layers": 2}, "routes layer 2"),
        ({"get_total_num_kv_heads": lambda: 4}, "2 key/value heads"),
    ],
)
def test_refused(saved, changes, says):
    adapter = read_adapter({"adapter": str(saved["cells"])})
    with pytest.raises(ValueError, match=says) as error:
        check_engine(engine(**changes), adapter)
    assert "\n" not in str(error.value) and str(saved["cells"]) in str(error.value)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (None, "such as"),
        ("org/name", "such as"),
        ({}, "names an adapter"),
        ({"adapter": 3}, "names an adapter"),
        ({"adapter": "a", "topk": 2}, "no 'topk', only adapter, revision, pairs, threshold, length, top_k"),
        ({"adapter": "a", "revision": 2}, "revision"),
    ],
)
def test_a_wrong_option(values, says):
    with pytest.raises(ValueError, match=says):
        read_adapter(values)


@pytest.mark.parametrize(
    ("kind", "dial", "says"),
    [
        ("shared", {"top_k": 9}, "top_k must be"),
        ("shared", {"top_k": "2"}, "top_k must be"),
        ("shared", {"pairs": 0.3}, "use top_k"),
        ("cells", {"pairs": 1.5}, "pairs must be"),
        ("cells", {"threshold": "low"}, "threshold must be"),
        ("cells", {"top_k": 2}, "use pairs"),
    ],
)
def test_a_wrong_dial(saved, kind, dial, says):
    with pytest.raises(ValueError, match=says):
        read_adapter({"adapter": str(saved[kind]), **dial})


def test_hostile_files(saved, tmp_path):
    def changed(name: str) -> Any:
        return shutil.copytree(saved["shared"], tmp_path / name)

    foreign = changed("foreign")
    tensors = load_file(foreign / WEIGHTS)
    save_file({**tensors, "base_model.model.lm_head.weight": torch.ones(3)}, foreign / WEIGHTS)
    twice = changed("twice")
    moved = {name.replace("model.layers.0.", "model.layers.1.extra."): tensor for name, tensor in tensors.items()}
    save_file(moved, twice / WEIGHTS)
    cut = changed("cut")
    (cut / WEIGHTS).write_bytes((cut / WEIGHTS).read_bytes()[:-8])
    pickled = changed("pickled")
    (pickled / WEIGHTS).rename(pickled / "adapter_model.bin")
    settings = changed("settings")
    config = json.loads((settings / "adapter_config.json").read_text())
    (settings / "adapter_config.json").write_text(json.dumps({**config, "num_groups": 10**9}))
    said = {foreign: "lm_head", twice: "twice", cut: "cut short", pickled: "pickle", settings: "num_groups"}
    for folder, says in said.items():
        with pytest.raises(ValueError, match=says) as error:
            read_adapter({"adapter": str(folder)})
        assert "\n" not in str(error.value)
