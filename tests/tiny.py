"""A tiny saved base model with a real tokenizer, and text for it, as `focus-hf train` wants them."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from focus_hf.demo.tiny_base import python_topics, train_tokenizer


def make_base(folder: Path) -> Path:
    """Write ``base`` (two layers, 512 positions, random weights), ``train.txt`` and ``held_out.txt``."""
    training, held_out = python_topics()
    (folder / "train.txt").write_text(training[:120_000], encoding="utf-8")
    (folder / "held_out.txt").write_text(held_out[:20_000], encoding="utf-8")
    tokenizer = train_tokenizer(training[:60_000])
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    for parameter in model.parameters():  # the usual initialisation is so small that attention hardly matters
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    return folder
