"""Sizes that the paper states, on models too large to build."""

from __future__ import annotations

import torch
from peft import get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import focus_hf
from focus_hf.adapter import focus_layers


def test_gpt2_has_148224_centroid_parameters():
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config())
    model = get_peft_model(model, focus_hf.FocusConfig(num_groups=4, task_type="CAUSAL_LM"))
    assert model.get_nb_trainable_parameters()[0] == 148_224


def test_a_70b_llama_takes_the_adapter_without_being_allocated(tmp_path):
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=32000,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = get_peft_model(model, focus_hf.FocusConfig(num_groups=8, task_type="CAUSAL_LM"))
    assert all(p.is_meta for n, p in model.named_parameters() if "focus_" not in n)
    state = get_peft_model_state_dict(model)
    assert len(focus_layers(model)) == 80 and len(state) == 240
    assert sum(t.numel() for n, t in state.items() if "balance" not in n) == 80 * (16 * 8192 + 8 * 16)
    assert all(t.dtype == torch.float32 and not t.is_meta for t in state.values())
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "adapter_model.safetensors")
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 45e6
