"""One of the processes of test_ranks.py."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from peft import get_peft_model
from torch import distributed
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed

from focus_hf import FocusConfig
from focus_hf.adapter import focus_layers
from focus_hf.adapter.save import save_adapter
from focus_hf.adapter.training import agree_on_balance
from focus_hf.texts import tokenize_windows
from focus_hf.train import TrainRecipe, train

STEPS = 4


class SaveStart(TrainerCallback):
    def __init__(self, out):
        self.out = out

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if state.is_world_process_zero:
            save_adapter(model, self.out / "start")
            (self.out / "start" / "adapter_model.safetensors").rename(self.out / "start.safetensors")


def ddp(tiny: Path, out: Path, batch_size: int, gate: str, distill: str) -> None:
    """The whole of `train`, as under ``accelerate launch``."""
    recipe = TrainRecipe(
        model=str(tiny / "base"),
        train_file=[str(tiny / "train.txt")],
        eval_file=[str(tiny / "held_out.txt")],
        output_dir=str(out),
        num_groups=4,
        local_window=8,
        gate=gate,
        distill=float(distill),
        seq_len=64,
        max_steps=STEPS,
        batch_size=batch_size,
        eval_windows=8,
        calibration_windows=16,
        eval_steps=2,
        trainer={"use_cpu": True, "disable_tqdm": True, "dataloader_num_workers": 0},
    )
    out.mkdir(parents=True, exist_ok=True)
    train(recipe, [SaveStart(out)])


def fsdp(tiny: Path, out: Path, batch_size: int, gate: str) -> None:
    """A plain loop over a model in shards."""
    if "RANK" in __import__("os").environ:
        distributed.init_process_group("gloo")
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    world = distributed.get_world_size() if distributed.is_initialized() else 1
    base = AutoModelForCausalLM.from_pretrained(tiny / "base")
    tokenizer = AutoTokenizer.from_pretrained(tiny / "base")
    windows = tokenize_windows(tokenizer, (tiny / "train.txt").read_text(), 64)
    set_seed(0)
    model = get_peft_model(base, FocusConfig(num_groups=4, local_window=8, gate=gate, task_type="CAUSAL_LM")).train()
    if world > 1:
        from torch.distributed.fsdp import fully_shard

        for layer in model.get_base_model().model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    for step in range(STEPS):
        batch = windows[step * 4 : (step + 1) * 4].chunk(world)[rank]
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for layer in focus_layers(model):
            agree_on_balance(layer)
    save_adapter(model, out, write=rank == 0)


if __name__ == "__main__":
    _, kind, tiny, out, batch_size, *how = sys.argv
    {"ddp": ddp, "fsdp": fsdp}[kind](Path(tiny), Path(out), int(batch_size), *how)
    if distributed.is_initialized():
        distributed.destroy_process_group()
