"""One of the processes of test_tensor_parallel.py: a model whose heads are split over processes, with adapters."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from focus_hf.adapter import focus_layers
from tests.families import token_ids

torch.set_num_threads(1)

PROMPT, NEW = 40, 12


def tokens(model: Any, **how: Any) -> list[list[int]]:
    return model.generate(token_ids(length=PROMPT), max_new_tokens=NEW, pad_token_id=0, **how).tolist()


def found(model: Any, adapters: list[str]) -> dict[str, Any]:
    """Of every adapter what it generates, and its logits; of the first the gradients of its centroids."""
    ids, result = token_ids(length=PROMPT), {}
    for name in adapters:
        model.set_adapter(name)
        with torch.no_grad():
            logits = model(ids).logits
        result[name] = {
            "greedy": tokens(model, do_sample=False),
            "beams": tokens(model, do_sample=False, num_beams=3),
            "logits": logits.tolist(),
            "gradients": gradients(model, ids) if name == adapters[0] else [],
        }
    return result


def gradients(model: Any, ids: torch.Tensor) -> list[Any]:
    model(ids, labels=ids).loss.backward()
    learned = [[*layer.focus_proj.values(), *layer.focus_centroids.values()] for layer in focus_layers(model)]
    return [p.grad.tolist() for layer in learned for p in layer if p.grad is not None]


def load(folder: Path, adapters: list[str], **how: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder / "base", **how).eval()
    model.generation_config.eos_token_id = None
    for name in adapters:
        model.load_adapter(str(folder / name), adapter_name=name)
    return model


if __name__ == "__main__":
    folder, adapters = Path(sys.argv[1]), sys.argv[2:]
    model = load(folder, adapters, distributed_config=DistributedConfig(tp_plan="auto"))
    heads = model.model.layers[0].self_attn.k_proj.weight.to_local().shape[0] // model.config.head_dim
    result = {"heads": heads, "adapters": found(model, adapters)}
    rank = torch.distributed.get_rank()
    (folder / f"{rank}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()
