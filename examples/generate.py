"""Load a Focus adapter and generate.

    python examples/generate.py --adapter org/llama-focus --prompt-file long.txt --pairs 0.15 --device cuda

Shows the one line that matters, `import focus_hf`; after it transformers loads the adapter like any other. With
--compare the same prompt is continued by the base model too. Base and adapter may be folders or Hub ids.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

import focus_hf  # registers the adapter type with PEFT and transformers


def continuation(model: Any, tokenizer: Any, prompt: str, new_tokens: int) -> str:
    """Greedy continuation of a prompt."""
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    output = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", required=True, help="the adapter: a folder or a Hub id")
    parser.add_argument("--base", help="base model, if not the one that the adapter names")
    parser.add_argument("--prompt", default="In the beginning")
    parser.add_argument("--prompt-file", type=Path, help="a text file instead of --prompt")
    parser.add_argument("--pairs", type=float, help="share of pairs, the dial; the adapter's own by default")
    parser.add_argument("--top-k", type=int, help="with shared routing: groups per token")
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument("--compare", action="store_true", help="let the base model continue the prompt too")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    base = args.base or PeftConfig.from_pretrained(args.adapter).base_model_name_or_path
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto").to(args.device).eval()
    model.load_adapter(args.adapter)
    if args.pairs is not None or args.top_k is not None:
        focus_hf.set_routing(model, pairs=args.pairs, top_k=args.top_k)

    prompt = args.prompt if args.prompt_file is None else args.prompt_file.read_text(encoding="utf-8")
    with torch.inference_mode():
        print("Focus:", continuation(model, tokenizer, prompt, args.max_new_tokens))
        if args.compare:
            model.disable_adapters()  # from here on it is the base model, bit for bit
            print("dense:", continuation(model, tokenizer, prompt, args.max_new_tokens))


if __name__ == "__main__":
    main()
