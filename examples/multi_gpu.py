"""A model too large for one GPU, such as 70B, with an adapter: two ways of spreading it.

    python examples/multi_gpu.py --adapter org/llama-70b-focus --prompt-file long.txt --device-map auto
    torchrun --nproc-per-node 8 examples/multi_gpu.py --adapter org/llama-70b-focus --prompt-file long.txt

The first puts whole layers on one GPU after the other (`device_map`): one process, one GPU at work at a time. The
second, under torchrun, splits every layer over all GPUs (`tp_plan`). Each layer's routing goes where the
layer is.

What we ran: both ways with a tiny model on CPU, the second as two processes; both generate what one process without
placement does. We have not run a 70B model, nor either way on several GPUs. To train a model in shards, see
examples/accelerate/fsdp2.yaml.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

import focus_hf


def load(base: str, device_map: str | None) -> Any:
    """The base model, split by tensors under torchrun, by layers otherwise."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        plan = DistributedConfig(tp_plan="auto")
        return AutoModelForCausalLM.from_pretrained(base, dtype="auto", distributed_config=plan)
    return AutoModelForCausalLM.from_pretrained(base, dtype="auto", device_map=device_map)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", required=True, help="the adapter: a folder or a Hub id")
    parser.add_argument("--base", help="base model, if not the one that the adapter names")
    parser.add_argument("--prompt-file", type=Path, required=True)
    parser.add_argument("--device-map", default="auto", help='auto, balanced, cpu ...; "none" for no placement')
    parser.add_argument("--pairs", type=float, help="share of pairs, the dial; the adapter's own by default")
    parser.add_argument("--top-k", type=int, help="with shared routing: groups per token")
    parser.add_argument("--max-new-tokens", type=int, default=100)
    args = parser.parse_args()

    base = args.base or PeftConfig.from_pretrained(args.adapter).base_model_name_or_path
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = load(base, None if args.device_map == "none" else args.device_map).eval()
    model.load_adapter(args.adapter)
    if args.pairs is not None or args.top_k is not None:
        focus_hf.set_routing(model, pairs=args.pairs, top_k=args.top_k)

    inputs = tokenizer(args.prompt_file.read_text(encoding="utf-8"), return_tensors="pt").to(model.device)
    with torch.inference_mode():
        output = model.generate(
            **inputs, max_new_tokens=args.max_new_tokens, do_sample=False, pad_token_id=tokenizer.eos_token_id
        )
    if os.environ.get("RANK", "0") == "0":
        devices = sorted({str(parameter.device) for parameter in model.parameters()})
        print(f"{inputs['input_ids'].shape[1]:,} tokens of prompt, model on {', '.join(devices)}")
        print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    main()
