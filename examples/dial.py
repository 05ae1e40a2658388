"""Turn the speed-quality dial: one adapter at several settings, beside the base model.

    python examples/dial.py --adapter org/llama-focus --text held-out.txt --seq-len 16384 --windows 8 --device cuda

Prints perplexity, the share of pairs attended and the seconds that reading one window takes. The dial is a share of
pairs (`--pairs 0.1 0.25`) or, with shared routing, groups per token (`--top-k 1 2`). `focus_hf.set_routing` changes a
loaded model at once; nothing is loaded again. Times are of one window, the fastest of three: for speed alone see
`focus-hf bench`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from focus_hf.adapter import focus_layers
from focus_hf.evaluate import Mode, SlidingWindows, attending, list_modes, measure_quality
from focus_hf.hub import load_adapted
from focus_hf.train import tokenize_windows


@torch.inference_mode()
def seconds(model: Any, window: Tensor) -> float:
    """Time of one prefill."""
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        logits = model(input_ids=window, use_cache=False, logits_to_keep=1).logits
        logits.sum().item()  # waits for a GPU
        taken.append(time.perf_counter() - start)
    return min(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", required=True, help="the adapter: a folder or a Hub id")
    parser.add_argument("--base", help="base model, if not the one that the adapter names")
    parser.add_argument("--text", type=Path, required=True, help="text that the adapter was not trained on")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--pairs", nargs="*", help="shares of pairs; 0.1, 0.15 and 0.25 by default")
    parser.add_argument("--top-k", type=int, nargs="*", help="with shared routing; 1 to 3 by default")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    model, tokenizer, _ = load_adapted(args.adapter, base=args.base, device=args.device)
    windows = tokenize_windows(tokenizer, args.text.read_text(encoding="utf-8"), args.seq_len)[: args.windows]
    config = focus_layers(model)[0].routing_config
    top_ks = args.top_k or ([config.top_k] if config.by_cells else range(1, min(3, config.num_groups) + 1))
    shares = args.pairs or (["0.1", "0.15", "0.25"] if config.by_cells else [])
    modes = list_modes(["dense", "local", "hard", "window"], top_ks, shares)
    text = SlidingWindows.of(windows.reshape(-1), args.seq_len, args.seq_len)

    print(f"{'attention':44} {'perplexity':>10} {'pairs':>7} {'seconds':>8}")
    for row in measure_quality(model, text, modes):  # beside each setting a plain window that costs as much
        # For a model in use: focus_hf.set_routing(model, pairs=...) or top_k=...
        with attending(model, Mode.of(row.to_dict()), windows[:1]):
            taken = seconds(model, windows[:1].to(args.device))
        print(f"{row!s:44} {row.perplexity:10.2f} {100 * row.pairs:6.1f}% {taken:8.3f}")


if __name__ == "__main__":
    main()
