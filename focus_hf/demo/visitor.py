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

from focus_hf import FocusConfig
from focus_hf.progress import quiet_libraries


@torch.no_grad()
def visit(adapter_id: str, expected: dict[str, Tensor]) -> dict[str, Any]:
    """Load the adapter through each stock loader, compare logits with those of its author, and generate."""
    base_id = str(FocusConfig.from_pretrained(adapter_id).base_model_name_or_path)
    load = AutoModelForCausalLM.from_pretrained
    model: Any = load(base_id)
    model.load_adapter(adapter_id)
    models = {
        "model.load_adapter": model,
        "AutoModelForCausalLM.from_pretrained": load(adapter_id),
        "PeftModel.from_pretrained": PeftModel.from_pretrained(load(base_id), adapter_id),
    }
    input_ids = expected["input_ids"]
    prompt = input_ids[:1, : input_ids.shape[1] // 2]
    model.eval()
    generated = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=60, do_sample=False, repetition_penalty=1.2
    )
    tokenizer = AutoTokenizer.from_pretrained(base_id)
    return {
        "logit_differences": {
            name: float((loaded.eval()(input_ids=input_ids).logits - expected["logits"]).abs().max())
            for name, loaded in models.items()
        },
        "prompt_end": tokenizer.decode(prompt[0, -40:]),
        "continuation": tokenizer.decode(generated[0, prompt.shape[1] :]),
    }


if __name__ == "__main__":
    adapter_name, logits_file, output = sys.argv[1:]
    quiet_libraries()
    Path(output).write_text(json.dumps(visit(adapter_name, load_file(logits_file))), encoding="utf-8")
