"""Distillation: the loss by hand, and what it does to a training."""

from __future__ import annotations

import pytest
import torch
from transformers import TrainingArguments

from focus_hf import routing
from focus_hf.adapter import focus_layers, routing_mode, set_routing
from focus_hf.train import RoutingSchedule, TrainRecipe, WindowDataset
from focus_hf.train.trainer import DistillingTrainer, prediction_distance
from tests.families import focus_model, token_ids


def trainer_for(model, tmp_path, share, **changes):
    arguments = {
        "output_dir": str(tmp_path),
        "max_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "steps",
        "logging_steps": 1,
        "lr_scheduler_type": "constant",
        "learning_rate": 1e-12,
    }
    return DistillingTrainer(
        model,
        TrainingArguments(**{**arguments, **changes}),
        train_dataset=WindowDataset(token_ids(batch=8, length=48)),
        eval_dataset=WindowDataset(token_ids(batch=2, length=48)),
        callbacks=[RoutingSchedule(model, gate=(8.0, 8.0))],
        share=share,
    )


def trainable(name="llama"):
    model = focus_model(name)
    for layer in focus_layers(model):
        layer.set_adapter("default")
    return model


def by_hand(logits, dense, labels):
    """KL by its definition, token by token, in float64."""
    p, q = torch.softmax(dense.double(), -1), torch.softmax(logits.double(), -1)
    each = (p * (p / q).log()).sum(-1)[:, :-1]
    return each[labels[:, 1:] != -100].sum()


def test_the_distance_is_the_divergence_of_predicted_tokens():
    torch.manual_seed(0)
    logits, dense = torch.randn(2, 6, 11), torch.randn(2, 6, 11)
    labels = torch.randint(0, 11, (2, 6))
    labels[0, 3:] = -100
    expected = by_hand(logits, dense, labels)
    assert prediction_distance(logits, dense, labels).item() == pytest.approx(expected.item(), rel=1e-5)
    assert prediction_distance(dense, dense, labels).item() == pytest.approx(0.0, abs=1e-5)
    nothing = torch.full_like(labels, -100)
    assert prediction_distance(logits, dense, nothing).item() == 0.0


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("accepts", [True, False])
@pytest.mark.parametrize("share", [0.75, 1.0])
def test_the_loss_is_shared(tmp_path, monkeypatch, accumulation, accepts, share):
    monkeypatch.setattr(routing, "BALANCE_RATE", 0.0)  # or the second half of a batch would see other groups
    model = trainable()
    trainer = trainer_for(
        model,
        tmp_path,
        share,
        per_device_train_batch_size=8 // accumulation,
        gradient_accumulation_steps=accumulation,
    )
    trainer.model_accepts_loss_kwargs = accepts
    windows = torch.stack([trainer.train_dataset[i]["input_ids"] for i in range(8)])
    with torch.no_grad():
        with model.disable_adapter():
            dense = model(input_ids=windows).logits
        set_routing(model, gate_strength=8.0)
        with routing_mode(model, "soft"):
            out = model(input_ids=windows, labels=windows, use_cache=False)
    distance = by_hand(out.logits, dense, windows) / windows[:, 1:].numel()
    assert distance > 0.001
    trainer.train()
    logged = trainer.state.log_history[0]["loss"]
    assert logged == pytest.approx(((1 - share) * out.loss + share * distance).item(), rel=2e-5)


def test_an_evaluation_is_the_language_model_loss(tmp_path):
    model = trainable()
    trainer = trainer_for(model, tmp_path, 1.0)
    measured = trainer.evaluate()["eval_loss"]
    windows = torch.stack([trainer.eval_dataset[i]["input_ids"] for i in range(2)])
    with torch.no_grad():
        expected = model.eval()(input_ids=windows, labels=windows, use_cache=False).loss
    assert measured == pytest.approx(expected.item(), rel=1e-5)


def test_dense_mode_is_the_base_model():
    model = focus_model("llama")
    ids = token_ids(length=48)
    with torch.no_grad():
        with model.disable_adapter():
            expected = model(input_ids=ids).logits
        with routing_mode(model, "dense"):
            assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)
        assert not torch.equal(model(input_ids=ids, use_cache=False).logits, expected)


def test_distillation_needs_a_frozen_model():
    given = {"model": "m", "output_dir": "o", "train_file": ["t"]}
    with pytest.raises(ValueError, match="needs weights='frozen'"):
        TrainRecipe(**given, distill=1.0, weights="trained")
    for wrong in (-1, 20, float("nan"), "much"):
        with pytest.raises(ValueError, match="distill is a share of the loss, from 0 to 1; got"):
            TrainRecipe(**given, distill=wrong)
