"""A tiny Llama-style language model, trained on the spot on English that every Python ships."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from rich.progress import Progress
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback, Trainer
from transformers import TrainingArguments as Arguments

from ..train import RichProgress, WindowDataset, tokenize_windows

VOCABULARY = 2048
CONTEXT = 512
END_OF_TEXT = "<|endoftext|>"


def python_topics(seed: int = 0) -> tuple[str, str]:
    """The language reference behind Python's ``help()``: training text, and every eighth topic for validation."""
    from pydoc_data.topics import topics

    names = sorted(topics)
    held_out = names[::8]
    training = [name for name in names if name not in held_out]
    random.Random(seed).shuffle(training)
    return "\n\n".join(topics[name] for name in training), "\n\n".join(topics[name] for name in held_out)


def train_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of this text."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text], vocab_size=VOCABULARY, special_tokens=[END_OF_TEXT], show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=CONTEXT,
    )


def train_tiny_base(text: str, folder: Path, progress: Progress, *, steps: int, seed: int = 0) -> None:
    """Train the tokenizer and the model (one million parameters, context 512) on a text and save both."""
    torch.manual_seed(seed)
    tokenizer = train_tokenizer(text)
    windows = tokenize_windows(tokenizer, text, CONTEXT, stride=CONTEXT // 8)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    trainer = Trainer(
        model=model,
        args=Arguments(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=4,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            warmup_steps=30,
            weight_decay=0.01,
            adam_beta2=0.95,
            seed=seed,
            save_strategy="no",
            report_to="none",
            logging_steps=10,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=WindowDataset(windows),
        callbacks=[RichProgress(progress, "base model")],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
