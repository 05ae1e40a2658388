"""Train centroids inside TRL's SFTTrainer.

    python examples/sft_trl.py --base org/base --dataset trl-lib/Capybara --output-dir my-adapter --steps 300

The trainer gets a `FocusConfig` where it would get a `LoraConfig`. Three lines do what `focus-hf train` does by
itself: `RoutingMonitor` logs the groups, `RoutingSchedule` lets their balance come to rest, `calibrate` balances them
at the end. Needs `pip install trl`. --train-file takes a text file instead of a data set, cut into pieces.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import datasets
import torch
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

import focus_hf
from focus_hf.adapter.save import save_adapter
from focus_hf.train import RoutingMonitor, RoutingSchedule, calibrate


def read_data(name: str | None, file: Path | None, characters: int) -> datasets.Dataset:
    """A data set of the Hub, or pieces of a text file."""
    if file is None:
        return datasets.load_dataset(name, split="train")
    text = file.read_text(encoding="utf-8")
    pieces = [text[start : start + characters] for start in range(0, len(text), characters)]
    return datasets.Dataset.from_dict({"text": pieces})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="causal language model: a folder or a Hub id")
    parser.add_argument("--dataset", help="a data set that SFTTrainer reads")
    parser.add_argument("--train-file", type=Path, help="a text file instead")
    parser.add_argument("--output-dir", default="my-adapter")
    parser.add_argument("--num-groups", type=int, default=8)
    parser.add_argument("--local-window", type=int, default=128)
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    if (args.dataset is None) == (args.train_file is None):
        parser.error("give either --dataset or --train-file")

    data = read_data(args.dataset, args.train_file, characters=4 * args.max_length)
    config = focus_hf.FocusConfig(num_groups=args.num_groups, local_window=args.local_window, task_type="CAUSAL_LM")
    arguments = SFTConfig(
        output_dir=f"{args.output_dir}/trainer",
        max_steps=args.steps,
        max_length=args.max_length,
        learning_rate=1e-2,  # centroids take a larger one than LoRA
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = SFTTrainer(args.base, arguments, train_dataset=data, peft_config=config)
    monitor = RoutingMonitor.attach(trainer)
    trainer.add_callback(RoutingSchedule(trainer.model))
    trainer.train()
    monitor.raise_if_diverged()

    tokenizer = AutoTokenizer.from_pretrained(args.base)
    sample = [
        torch.tensor([ids])
        for row in trainer.train_dataset.select(range(min(32, len(trainer.train_dataset))))
        if len(ids := list(row.get("input_ids") or tokenizer(row["text"])["input_ids"])) > args.local_window
    ]
    shares = calibrate(trainer.model, sample)
    print(f"Largest group of any layer: {100 * max(shares.values()):.1f} % (ideal {100 / args.num_groups:.1f} %)")
    print(f"The adapter is in {save_adapter(trainer.model, args.output_dir)}")


if __name__ == "__main__":
    main()
