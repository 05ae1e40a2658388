"""The monitor in Trainers that are not ours: TRL's, and any with reporters."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from focus_hf import FocusConfig
from focus_hf.adapter import focus_layers, routing_mode
from focus_hf.attention import Pattern
from focus_hf.train import RoutingMonitor, RoutingSchedule, TrainingDiverged, WindowDataset
from tests.families import focus_model, pairs_of, token_ids


class Reporter(TrainerCallback):
    """What tensorboard or wandb would be told."""

    def __init__(self):
        self.heard = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.heard.append(dict(logs))


def make_trainer(model, tmp_path, **changes):
    arguments = {
        "output_dir": str(tmp_path),
        "max_steps": 4,
        "logging_steps": 2,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    reporter = Reporter()
    data = WindowDataset(token_ids(batch=16, length=40))
    trainer = Trainer(
        model,
        TrainingArguments(**{**arguments, **changes}),
        train_dataset=data,
        eval_dataset=data,
        callbacks=[reporter],
    )
    return trainer, reporter


def trainable(**changes):
    model = focus_model("llama", **changes)
    for layer in focus_layers(model):
        layer.set_adapter("default")
    return model


def test_reporters_that_come_first_hear_of_the_groups(tmp_path):
    trainer, reporter = make_trainer(trainable(gate="additive"), tmp_path, eval_strategy="steps", eval_steps=2)
    RoutingMonitor.attach(trainer)
    trainer.train()
    heard = [logs for logs in reporter.heard if "loss" in logs]
    assert len(heard) == 2
    for logs in heard:
        assert 0.25 <= logs["largest_group"] <= 1 and 0.25 <= logs["confidence"] <= 1 and 0 < logs["pairs"] <= 1
    assert all(layer.observer is None for layer in focus_layers(trainer.model))


def test_the_figures_are_those_of_the_model(tmp_path):
    """With a learning rate of nothing the first batch can be looked at again."""
    model = trainable()
    ids = token_ids(batch=4, length=40)
    trainer, _ = make_trainer(model, tmp_path, max_steps=1, logging_steps=1, learning_rate=0.0)
    trainer.train_dataset = WindowDataset(ids)
    trainer.args.per_device_train_batch_size = 4
    RoutingMonitor.attach(trainer)
    seen = {}

    def look(layer, scores, memberships):
        shares = memberships.flatten(0, 1).float().mean(dim=0)
        attended, possible = pairs_of(Pattern(8, 2), memberships[order[:1]])
        seen[layer.name] = (shares.max().item(), attended / possible)

    order = torch.arange(4)
    from focus_hf.adapter import observe_routing

    with observe_routing(model, look), routing_mode(model, "soft"), torch.no_grad():
        model(input_ids=ids, use_cache=False)
    trainer.get_train_dataloader = lambda: torch.utils.data.DataLoader(WindowDataset(ids), batch_size=4)
    trainer.train()
    logs = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert logs["largest_group"] == pytest.approx(max(largest for largest, _ in seen.values()))
    assert logs["pairs"] == pytest.approx(sum(pairs for _, pairs in seen.values()) / len(seen))


def test_the_loss_of_an_evaluation_is_that_of_hard_attention(tmp_path):
    model = trainable(gate="additive")
    trainer, _ = make_trainer(model, tmp_path, per_device_eval_batch_size=8)
    RoutingMonitor.attach(trainer)
    metrics = trainer.evaluate()
    ids = token_ids(batch=16, length=40)
    losses = {}
    for mode in ("soft", "hard"):
        with routing_mode(model, mode), torch.no_grad():
            losses[mode] = model(input_ids=ids, labels=ids, use_cache=False).loss.item()
    assert metrics["eval_loss"] == pytest.approx(losses["hard"], rel=1e-4)
    assert losses["soft"] != pytest.approx(losses["hard"], rel=1e-4)


def test_a_gradient_that_is_not_finite_never_reaches_the_parameters(tmp_path):
    model = trainable()
    trainer, _ = make_trainer(model, tmp_path)
    monitor = RoutingMonitor.attach(trainer)
    before = focus_layers(model)[1].focus_proj["default"].detach().clone()
    focus_layers(model)[1].focus_proj["default"].register_hook(lambda gradient: gradient * math.inf)
    trainer.train()
    assert monitor.diverged_at == 1 and trainer.state.global_step == 1
    assert torch.equal(focus_layers(model)[1].focus_proj["default"], before)
    with pytest.raises(TrainingDiverged, match="not finite at step 1"):
        monitor.raise_if_diverged()


def test_sft_trainer_of_trl(tiny, tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    text = (tiny / "train.txt").read_text()
    data = datasets.Dataset.from_dict({"text": [text[i : i + 400] for i in range(0, 12_000, 400)]})
    trainer = trl.SFTTrainer(
        str(tiny / "base"),
        trl.SFTConfig(
            output_dir=str(tmp_path / "sft"),
            max_steps=3,
            max_length=128,
            logging_steps=1,
            learning_rate=1e-2,
            report_to="none",
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=data,
        peft_config=FocusConfig(num_groups=4, local_window=8, task_type="CAUSAL_LM"),
    )
    trainer.add_callback(RoutingSchedule(trainer.model))
    RoutingMonitor.attach(trainer)
    before = [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]
    trainer.train()
    trainable = [p for p in trainer.model.parameters() if p.requires_grad]
    assert trainable and all(not torch.equal(a, b) for a, b in zip(trainable, before, strict=True))
    assert all("largest_group" in entry for entry in trainer.state.log_history if "loss" in entry)
    trainer.save_model(str(tmp_path / "adapter"))
    assert FocusConfig.from_pretrained(str(tmp_path / "adapter")).num_groups == 4
