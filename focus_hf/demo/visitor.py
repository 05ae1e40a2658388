"""What another person does with the adapter: a process of its own that knows the Hub and the adapter's name only.

Run by the demo as ``python -m focus_hf.demo.visitor ORG/NAME EXPECTED.safetensors OUTPUT.json``, with ``HF_ENDPOINT``
and an empty ``HF_HOME`` in the environment.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import focus_hf
from focus_hf.adapter import focus_layers


def load_three_ways(adapter_id: str, base_id: str) -> dict[str, Any]:
    """The same adapter through each stock loader."""
    with_load_adapter = AutoModelForCausalLM.from_pretrained(base_id)
    with_load_adapter.load_adapter(adapter_id)
    return {
        "model.load_adapter": with_load_adapter,
        "AutoModelForCausalLM.from_pretrained": AutoModelForCausalLM.from_pretrained(adapter_id),
        "PeftModel.from_pretrained": PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base_id), adapter_id
        ),
    }


@torch.no_grad()
def visit(adapter_id: str, expected: dict[str, Tensor]) -> dict[str, Any]:
    """Load the adapter in each way, compare logits with those of its author, and generate."""
    base_id = str(focus_hf.FocusConfig.from_pretrained(adapter_id).base_model_name_or_path)
    models = load_three_ways(adapter_id, base_id)
    input_ids = expected["input_ids"]
    differences = {}
    for name, model in models.items():
        logits = model.eval()(input_ids=input_ids).logits
        differences[name] = float((logits - expected["logits"]).abs().max())

    tokenizer = AutoTokenizer.from_pretrained(base_id)
    model = models["model.load_adapter"]
    prompt = input_ids[:1, : input_ids.shape[1] // 2]
    generated = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=60, do_sample=False, repetition_penalty=1.2
    )
    return {
        "base": base_id,
        "routed_layers": len(focus_layers(model)),
        "logit_differences": differences,
        "prompt_end": tokenizer.decode(prompt[0, -40:]),
        "continuation": tokenizer.decode(generated[0, prompt.shape[1] :]),
    }


def main() -> None:
    adapter_id, expected, output = sys.argv[1:]
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    report = visit(adapter_id, load_file(expected))
    Path(output).write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
