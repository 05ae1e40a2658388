"""Train an adapter on a text file of your own, in Python.

    python examples/train_text.py --base org/base --train-file domain.txt --output-dir my-adapter --steps 600

The same as `focus-hf train`, from a script: read text, train centroids, balance the groups, measure held-out text in
every mode, save the adapter with its card. Every field of `TrainRecipe` is a flag of that command. On several GPUs
start it with `accelerate launch --config_file examples/accelerate/ddp.yaml examples/train_text.py ...`.
"""

from __future__ import annotations

import argparse
import os

import torch

from focus_hf.card import write_card
from focus_hf.records.results import mode_name
from focus_hf.train import TrainRecipe, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="causal language model: a folder or a Hub id")
    parser.add_argument("--train-file", required=True, help="text file, or .jsonl with one document a line")
    parser.add_argument("--eval-file", help="held-out text; the tail of the training text by default")
    parser.add_argument("--output-dir", default="my-adapter")
    parser.add_argument("--num-groups", type=int, default=8)
    parser.add_argument("--local-window", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=4)
    args = parser.parse_args()

    recipe = TrainRecipe(
        model=args.base,
        train_file=[args.train_file],
        eval_file=[args.eval_file] if args.eval_file else [],
        output_dir=args.output_dir,
        num_groups=args.num_groups,
        local_window=args.local_window,
        seq_len=args.seq_len,
        max_steps=args.steps,
        batch_size=args.batch_size,
        bf16=torch.cuda.is_available(),
        trainer={"disable_tqdm": False},
    )
    result = train(recipe, say=print, on_saved=write_card)
    if os.environ.get("RANK", "0") != "0":
        return
    for row in result.results.evaluations[0].rows:
        pairs = f"{100 * row['pairs']:.0f} % of the pairs"
        print(f"{mode_name(row['mode'], row['top_k']):28} perplexity {row['perplexity']:.2f}, {pairs}")
    print(f"The adapter is in {result.folder}. Share it: focus-hf push {result.folder} you/name --dry-run")


if __name__ == "__main__":
    main()
