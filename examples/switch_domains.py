"""Two adapters on one model: switch the domain, not the model.

    python examples/switch_domains.py --adapters law=org/llama-focus-law code=org/llama-focus-code \\
        --texts law=law.txt code=code.txt --seq-len 4096

Loads the base model once and every adapter beside it (a few megabytes each), then reads every text under every
adapter. Each adapter should be best on its own text; the table shows whether it is.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from peft import PeftConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import focus_hf  # noqa: F401  registers the adapter type
from focus_hf.evaluate import perplexity
from focus_hf.train import tokenize_windows


def named(pairs: list[str]) -> dict[str, str]:
    """``name=value`` pairs."""
    return dict(pair.split("=", 1) for pair in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", nargs="+", required=True, metavar="NAME=ADAPTER", help="folders or Hub ids")
    parser.add_argument("--texts", nargs="+", required=True, metavar="NAME=FILE")
    parser.add_argument("--base", help="base model, if not the one that the first adapter names")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    adapters, texts = named(args.adapters), named(args.texts)
    base = args.base or PeftConfig.from_pretrained(next(iter(adapters.values()))).base_model_name_or_path
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto").to(args.device).eval()
    logging.set_verbosity_error()  # at the second adapter, transformers wrongly lists tensors of the first as missing
    for name, adapter in adapters.items():
        model.load_adapter(adapter, adapter_name=name)

    windows = {
        name: tokenize_windows(tokenizer, Path(file).read_text(encoding="utf-8"), args.seq_len)[: args.windows]
        for name, file in texts.items()
    }
    print(f"{'perplexity':16}", *(f"{name:>12}" for name in windows))
    for name in adapters:
        model.set_adapter(name)  # one Focus adapter at a time; a LoRA may be active beside it
        print(f"{name:16}", *(f"{perplexity(model, some):12.3f}" for some in windows.values()))
    model.disable_adapters()
    print(f"{'dense':16}", *(f"{perplexity(model, some):12.3f}" for some in windows.values()))


if __name__ == "__main__":
    main()
