"""Quantised base models, quantised KV caches and offloaded weights: held to what holds of any base model.

Tests of a package that is not installed are skipped; docs/quantised.md says where they were run.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    QuantizedCache,
    cache_utils,
)

import focus_hf
from studies.architectures import checks
from studies.architectures.checks import CHECKS, differ, layers, logits, routed, tokens

WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, CONTEXT = 64, 2, 4, 2, 16, 99, 256


def llama() -> LlamaForCausalLM:
    """A small Llama whose attention matters, with widths that group-wise quantisation can divide."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            max_position_embeddings=CONTEXT,
        )
    ).eval()
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=0.25)
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, saved."""
    path = tmp_path_factory.mktemp("base")
    llama().save_pretrained(path)
    return path


def hold(make: Callable[[], Any], without: tuple[str, ...] = ()) -> None:
    """All checks of docs/architectures.md; not every quantised model can be copied."""
    base, model = make(), routed(make())
    wanted = {**CHECKS, "save_and_load": functools.partial(checks.save_and_load, another=lambda _: make())}
    found = {name: check(base, model) for name, check in wanted.items() if name not in without}
    assert not any(found.values()), found


# -- weights -------------------------------------------------------------------------------------------------------


def by_bitsandbytes(folder: Path, **how: bool) -> Any:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=BitsAndBytesConfig(**how))


def by_torchao(folder: Path, kind: str) -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    how = TorchAoConfig(getattr(quantization, kind)())
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=how, dtype=torch.float32)


def by_quanto(folder: Path) -> Any:
    pytest.importorskip("optimum.quanto")
    from transformers import QuantoConfig

    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=QuantoConfig(weights="int8"))


def by_gguf(folder: Path) -> Any:
    gguf = pytest.importorskip("gguf")
    path = folder / "tiny-q8_0.gguf"
    if not path.exists():
        write_gguf(gguf, path)
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=path.name)


def write_gguf(gguf: Any, path: Path) -> None:
    """The model as llama.cpp's converter writes it, matrices in Q8_0."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_vocab_size(VOCABULARY)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"<{number}>" for number in range(VOCABULARY)])
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for layer in range(LAYERS):
        for ours, theirs in parts.items():
            names[f"model.layers.{layer}.{ours}.weight"] = f"blk.{layer}.{theirs}.weight"
    for name, tensor in llama().state_dict().items():
        array = tensor.numpy().astype(np.float32)
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
        if heads:  # llama.cpp rotates neighbours, transformers halves
            array = array.reshape(heads, 2, HEAD_DIM // 2, WIDTH).swapaxes(1, 2).reshape(array.shape)
        if array.ndim == 1:
            writer.add_tensor(names[name], array)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(names[name], gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class PackedLinear(nn.Module):
    """A linear layer as GPTQ's and AWQ's packages make it: no weight and no parameter, but buffers of packed 4-bit
    numbers, in columns (GPTQ) or in rows (AWQ), with scales and zeros for each group of inputs.
    """

    def __init__(self, linear: nn.Linear, by: str, group_size: int = 32) -> None:
        super().__init__()
        self.in_features, self.out_features, self.by, self.group_size = *reversed(linear.weight.shape), by, group_size
        groups = linear.weight.detach().T.unflatten(0, (-1, group_size))  # (groups, group_size, out)
        low, high = groups.amin(dim=1, keepdim=True), groups.amax(dim=1, keepdim=True)
        scales = (high - low) / 15
        numbers = ((groups - low) / scales).round().clamp(0, 15).flatten(0, 1).to(torch.int32)  # (in, out)
        self.register_buffer("scales", scales[:, 0])
        self.register_buffer("zeros", low[:, 0])
        self.register_buffer("qweight", self._pack(numbers if by == "gptq" else numbers.T))

    @staticmethod
    def _pack(numbers: Tensor) -> Tensor:
        eight = numbers.unflatten(0, (-1, 8))
        return sum(eight[:, i] << (4 * i) for i in range(8))

    def forward(self, x: Tensor) -> Tensor:
        shifts = torch.arange(0, 32, 4)[None, :, None]
        numbers = ((self.qweight[:, None] >> shifts) & 15).flatten(0, 1)
        numbers = numbers if self.by == "gptq" else numbers.T
        groups = numbers.unflatten(0, (-1, self.group_size)) * self.scales[:, None] + self.zeros[:, None]
        return x @ groups.flatten(0, 1).to(x.dtype)


def by_packing(folder: Path, by: str) -> Any:
    model = llama()
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, child in list(block.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(block, name, PackedLinear(child, by))
    return model


WEIGHTS: dict[str, Callable[[Path], Any]] = {
    "bitsandbytes, 8 bits": functools.partial(by_bitsandbytes, load_in_8bit=True),
    "bitsandbytes, 4 bits": functools.partial(by_bitsandbytes, load_in_4bit=True),
    "torchao, int8 weights": functools.partial(by_torchao, kind="Int8WeightOnlyConfig"),
    "torchao, int8 weights and activations": functools.partial(
        by_torchao, kind="Int8DynamicActivationInt8WeightConfig"
    ),
    "quanto, int8": by_quanto,
    "GGUF, Q8_0": by_gguf,
    "GPTQ, by construction": functools.partial(by_packing, by="gptq"),
    "AWQ, by construction": functools.partial(by_packing, by="awq"),
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights(kind, folder, monkeypatch):
    def make() -> Any:
        return WEIGHTS[kind](folder).eval()

    plain = logits(llama(), tokens())
    error = (logits(make(), tokens()) - plain).abs().mean() / plain.std()
    assert 0 < error < 1  # it is that model, and it is quantised
    without: tuple[str, ...] = ()
    if "activations" in kind:  # rounded, so that rounding elsewhere shows; and torchao has no gradient through them
        monkeypatch.setattr(checks, "TOLERANCE", 0.2)
        without = ("gradients",)
    hold(make, without)


def test_centroids_go_where_buffers_are():
    """A packed layer has no parameters to tell the device."""
    model = routed(by_packing(Path(), "gptq"))
    for layer in layers(model):
        device, dtype = layer._get_base_layer_device_and_dtype(layer.get_base_layer())
        assert (device, dtype) == (torch.device("cpu"), None)


# -- caches --------------------------------------------------------------------------------------------------------


def quantised_cache(backend: str, config: Any, residual_length: int) -> QuantizedCache:
    if backend == "fp8":
        if not hasattr(cache_utils, "Fp8QuantizedLayer"):
            pytest.skip("this version of transformers has no fp8 cache")
        return QuantizedCache("fp8", config)
    pytest.importorskip({"quanto": "optimum.quanto", "hqq": "hqq.core.quantize"}[backend])
    bits = {"quanto": 4, "hqq": 8}[backend]
    axis = {"quanto": 0, "hqq": 1}[backend]
    return QuantizedCache(
        backend, config, bits, axis_key=axis, axis_value=axis, q_group_size=16, residual_length=residual_length
    )


@torch.no_grad()
def decoded(model: Any, ids: Tensor, start: int, cache: Any) -> Tensor:
    """Logits of the tokens after ``start``, one by one."""
    model(input_ids=ids[:, :start], past_key_values=cache, use_cache=True)
    steps = [
        model(input_ids=ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits
        for i in range(start, ids.shape[1])
    ]
    return torch.cat(steps, dim=1)


@pytest.mark.parametrize("backend", ["fp8", "quanto", "hqq"])
@pytest.mark.parametrize("residual_length", [4, 128])
def test_caches(backend, residual_length):
    """Decoding through it is as far from a pass without it as the base model's, and attends to the pairs it should."""
    base, ids, start = llama(), tokens(), 25
    make = functools.partial(quantised_cache, backend, base.config, residual_length)
    model = routed(copy.deepcopy(base))
    own_error = (decoded(base, ids, start, make()) - logits(base, ids)[:, start:]).abs().mean()
    found = decoded(model, ids, start, make())
    error = (found - logits(model, ids)[:, start:]).abs().mean()
    assert 0 < error <= 2 * own_error
    assert differ(found, decoded(base, ids, start, make()))  # Focus is at work
    focus_hf.set_routing(model, path="masked")
    assert differ(decoded(model, ids, start, make()), found) is None
    with model.disable_adapter():
        assert torch.equal(decoded(model, ids, start, make()), decoded(base, ids, start, make()))


#: docs/limits.md says so.
_LOST = pytest.mark.xfail(
    reason="a reordered fp8 cache forgets which groups its keys had before they were rounded", strict=True
)


@pytest.mark.parametrize("backend", [pytest.param("fp8", marks=_LOST), "quanto", "hqq"])
@pytest.mark.parametrize("routing", ["shared", "cells"])
def test_beams_take_their_groups_along(backend, routing):
    """A cache whose rows are swapped goes on as if they had never been another way round."""
    model, ids = routed(llama(), routing=routing), tokens()
    make = functools.partial(quantised_cache, backend, model.config, residual_length=4)
    cache = make()
    decoded(model, ids[:, :32], 25, cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    found = decoded(model, ids.flip(0)[:, 32:], 1, cache)
    assert differ(found, decoded(model, ids.flip(0), 25, make())[:, 8:]) is None
    assert differ(found, decoded(model, ids, 25, make())[:, 8:])


@pytest.mark.parametrize("backend", ["fp8", "quanto", "hqq"])
def test_generate_through_caches(backend):
    """`generate` makes the cache by itself; where Focus attends to everything its tokens are the base model's."""
    base, ids = llama(), tokens(12)
    how: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    settings: dict[str, Any] = {"backend": backend}
    quantised_cache(backend, base.config, residual_length=4)  # skipped without its package
    if backend != "fp8":
        settings |= {"nbits": 4 if backend == "quanto" else 8, "q_group_size": 16, "residual_length": 4}
        settings |= {"axis_key": 1, "axis_value": 1} if backend == "hqq" else {}
    how |= {"cache_implementation": "quantized", "cache_config": settings}
    dense = base.generate(ids, **how)
    model = routed(copy.deepcopy(base))
    assert not torch.equal(model.generate(ids, **how), dense)
    focus_hf.set_routing(model, top_k=3)  # of four: any two tokens share a group
    assert torch.equal(model.generate(ids, **how), dense)


# -- offload -------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(tmp_path: Path) -> tuple[Path, Tensor]:
    """A saved adapter, and the logits that it gives."""
    model = routed(llama())
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", logits(model, tokens())


def offloaded(folder: Path, scratch: Path, where: str) -> Any:
    pytest.importorskip("accelerate")
    from accelerate import cpu_offload

    if where == "cpu":
        return cpu_offload(llama(), execution_device=torch.device("cpu"))
    device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    device_map |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    return AutoModelForCausalLM.from_pretrained(folder, device_map=device_map, offload_folder=scratch)


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("loader", ["load_adapter", "PeftModel"])
def test_offloaded_weights(where, loader, folder, tmp_path, adapter):
    path, expected = adapter
    base = offloaded(folder, tmp_path / "offload", where)
    assert any(parameter.is_meta for parameter in base.parameters())
    dense = logits(llama(), tokens())
    assert torch.equal(logits(base, tokens()), dense)
    if loader == "load_adapter":
        base.load_adapter(str(path))
        model = base
    elif where == "disk":
        with pytest.raises(ValueError, match="with parts on disk.*load_adapter"):
            PeftModel.from_pretrained(base, path, offload_folder=str(tmp_path / "offload"))
        return
    else:
        model = PeftModel.from_pretrained(base, path, offload_folder=str(tmp_path / "offload"))
    assert torch.equal(logits(model, tokens()), expected)
    ids, start = tokens(), 25
    assert differ(decoded(model, ids, start, DynamicCache()), expected[:, start:]) is None
    if loader == "load_adapter":
        model.disable_adapters()
        assert torch.equal(logits(model, tokens()), dense)
    else:
        with model.disable_adapter():
            assert torch.equal(logits(model, tokens()), dense)


def test_offloaded_weights_train(folder, tmp_path):
    """Gradients reach the centroids of a layer whose weights come and go."""
    model = routed(offloaded(folder, tmp_path / "offload", "cpu")).train()
    model(input_ids=tokens(), labels=tokens(), use_cache=False).loss.backward()
    for layer in layers(model):
        assert layer.focus_proj["default"].grad.abs().sum() > 0


def test_centroids_go_where_offloaded_weights_are_used(folder, tmp_path):
    """What is on no device says where its hook brings it."""
    base = offloaded(folder, tmp_path / "offload", "cpu")
    for layer in layers(routed(base)):
        device, _ = layer._get_base_layer_device_and_dtype(layer.get_base_layer())
        assert device == torch.device("cpu")
