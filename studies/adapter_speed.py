"""How long a real model takes without and with an adapter: prompts and single tokens, in turn.

    python -m studies.adapter_speed --adapter adapters/smollm2-135m --text adapters/smollm2-135m/held_out/plays.txt \
        --setting 1024:0.15 2048:0.15 4096:0.15 8192:0.15

Wall-clock time: of prompts the best of a few rounds, of tokens the median. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from focus_hf import set_routing
from focus_hf.hub import load_adapted
from focus_hf.texts import tokenize_windows


@torch.no_grad()
def times(models: dict[str, Any], ids: Tensor, new: int) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Milliseconds of each model for a prompt ``(T,)``, and for each of ``new`` greedy tokens after it.

    Models take turns at every token, so that what else the machine does meets all of them.
    """
    prompts, tokens, outputs = {}, {name: [] for name in models}, {}
    for name, model in models.items():
        start = time.perf_counter()
        outputs[name] = model(input_ids=ids[None], use_cache=True, logits_to_keep=1)
        prompts[name] = (time.perf_counter() - start) * 1000
    for step in range(new):
        for name in list(models)[:: 1 if step % 2 else -1]:
            token, start = outputs[name].logits[:, -1:].argmax(-1), time.perf_counter()
            outputs[name] = models[name](
                input_ids=token, past_key_values=outputs[name].past_key_values, use_cache=True
            )
            tokens[name].append((time.perf_counter() - start) * 1000)
    return prompts, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", required=True, help="folder or Hub id")
    parser.add_argument("--base", help="base model, the adapter's own by default")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--setting", nargs="+", required=True, help="length:share, as 2048:0.15, or a length alone")
    parser.add_argument("--dense-below", type=int, help="as of set_routing; the adapter's own by default")
    parser.add_argument("--new", type=int, default=32, help="tokens decoded after a prompt")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer, _ = load_adapted(args.adapter, base=args.base)
    models = {"dense": AutoModelForCausalLM.from_pretrained(model.name_or_path).to(model.dtype).eval(), "Focus": model}
    for setting in args.setting:
        length, _, share = setting.partition(":")
        ids = tokenize_windows(tokenizer, args.text.read_text(encoding="utf-8"), int(length))[0]
        set_routing(model, pairs=float(share) if share else None, dense_below=args.dense_below)
        rounds = [times(models, ids, args.new) for _ in range(args.rounds)]
        for what in ("prompt", "token"):
            if what == "prompt":
                dense, focus = (min(prompts[name] for prompts, _ in rounds) for name in models)
            else:
                dense, focus = (statistics.median(ms for _, each in rounds for ms in each[name]) for name in models)
            print(f"{setting} {what}: dense {dense:.0f} ms, Focus {focus:.0f} ms, {dense / focus:.2f}x", flush=True)


if __name__ == "__main__":
    main()
