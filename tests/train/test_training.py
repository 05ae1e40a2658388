"""Training, calibration and evaluation on models small enough to train in seconds."""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model
from transformers import Trainer, TrainingArguments

import focus_hf
from focus_hf import routing
from focus_hf.adapter import focus_layers, hooks, observe_routing, routing_mode
from focus_hf.train import RoutingMonitor, RoutingSchedule, WindowDataset, calibrate
from tests.families import FAMILIES, base_model, focus_config, focus_model, logits, token_ids


def copying_task(windows=64, half=24, seed=0):
    """Every window says a random phrase twice: the second time is predictable only by looking far back."""
    generator = torch.Generator().manual_seed(seed)
    phrase = torch.randint(2, 99, (windows, half), generator=generator)
    return torch.cat([phrase, phrase], dim=1)


def train_centroids(model, windows, folder, steps, **arguments):
    """As one does in a Trainer of one's own, see docs/training.md."""
    arguments = TrainingArguments(
        str(folder),
        max_steps=steps,
        learning_rate=1e-2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **arguments,
    )
    trainer = Trainer(model, arguments, train_dataset=WindowDataset(windows), callbacks=[RoutingSchedule(model)])
    monitor = RoutingMonitor.attach(trainer)
    trainer.train()
    monitor.raise_if_diverged()
    model.eval()


def test_training_leaves_a_balanced_adapter_and_lowers_the_loss(tmp_path):
    torch.manual_seed(0)
    model = get_peft_model(base_model("llama"), focus_config())
    windows = copying_task()
    before = [p.clone() for p in model.parameters() if p.requires_grad]
    train_centroids(model, windows, tmp_path, steps=8)
    shares = calibrate(model, windows.split(8))
    assert set(shares) == {layer.name for layer in focus_layers(model)}
    assert max(shares.values()) <= 1.5 / 4
    after = [p for p in model.parameters() if p.requires_grad]
    assert all(not torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert not model.training and focus_layers(model)[0].gate_strength is None


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_hard_training_runs_what_inference_runs_and_teaches_the_centroids(family, top_k):
    """The loss is that of hard attention, and its gradient reaches every layer's centroids and projection."""
    model = focus_model(family, gate="hard", top_k=top_k)
    ids = token_ids(length=48)
    with routing_mode(model, "hard"), torch.no_grad():
        expected = model(input_ids=ids, labels=ids, use_cache=False).loss
    with routing_mode(model, "soft"):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_base_weights_learn_through_hard_attention():
    """LoRA or full training with a Focus adapter on: gradients equal those of the path with explicit masks."""
    gradients = {}
    for path in ("grouped", "masked"):
        model = focus_model("llama")
        focus_hf.set_routing(model, path=path, mode="hard")
        weight = model.base_model.model.model.layers[0].self_attn.q_proj.weight.requires_grad_()
        ids = token_ids(length=48)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients[path] = weight.grad
    assert gradients["masked"].abs().max() > 0
    torch.testing.assert_close(gradients["grouped"], gradients["masked"], rtol=1e-4, atol=1e-6)


def test_the_same_seed_gives_the_same_adapter(tmp_path):
    results = []
    for run in range(2):
        base = base_model("llama")
        torch.manual_seed(0)
        model = get_peft_model(base, focus_config())
        train_centroids(model, copying_task(), tmp_path / str(run), steps=3, seed=5)
        results.append(logits(model, token_ids()))
    assert torch.equal(*results)


def test_balance_follows_the_batches_once_per_step():
    torch.manual_seed(0)
    model = get_peft_model(base_model("llama"), focus_config()).train()
    layer = focus_layers(model)[0]
    ids = token_ids(length=40)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    assert not layer.focus_balance["default"].any()  # not in the forward pass
    loss.backward()
    first = layer.focus_balance["default"].clone()
    assert first.any() and abs(first.mean().item()) < 1e-5
    seen = {}
    with observe_routing(model, lambda layer, scores, memberships: seen.update({layer.name: scores})):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    expected = first + routing.balance_step(seen[layer.name], first, layer.routing_config.top_k)
    torch.testing.assert_close(layer.focus_balance["default"].data, expected)
    layer.balance_rate = 0.0
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    torch.testing.assert_close(layer.focus_balance["default"].data, expected)


def test_calibrate_needs_batches():
    with pytest.raises(ValueError, match="at least one batch"):
        calibrate(focus_model("llama"), [])


def test_set_routing_top_k_is_saved_with_the_adapter(tmp_path):
    model = focus_model("llama")
    focus_hf.set_routing(model, top_k=3)
    model.save_pretrained(tmp_path)
    assert focus_hf.FocusConfig.from_pretrained(str(tmp_path)).top_k == 3


def test_calibration_gives_scores_the_spread_of_training_and_moves_no_token():
    model = focus_model("llama", sharpness=3.0)
    batches = [token_ids(length=48)]
    before = logits(model, batches[0])
    calibrate(model, batches, rounds=0)
    torch.testing.assert_close(logits(model, batches[0]), before)
    seen = {}
    with torch.no_grad(), observe_routing(model, lambda layer, scores, _: seen.update({layer.name: scores})):
        model(input_ids=batches[0], use_cache=False)
    for scores in seen.values():
        assert routing.score_spread(scores.flatten(0, 1)[None]).item() == pytest.approx(3.0, rel=1e-3)


@pytest.mark.parametrize(("gate", "sharpness"), [("additive", None), ("hard", 1.5)])
def test_assignments_are_as_decided_as_asked(gate, sharpness):
    model = focus_model("llama", gate=gate, sharpness=1.5).train()
    focus_hf.set_routing(model, mode="soft")
    layer, ids = focus_layers(model)[0], token_ids(length=40)
    seen = {}
    with observe_routing(model, lambda layer, scores, _: seen.update({layer.name: scores})):
        handle = _keep_assignments(layer, seen)
        model(input_ids=ids, use_cache=False)
    handle.undo()
    factor = routing.sharpening(seen[layer.name], sharpness)
    balance = layer.focus_balance["default"]
    expected, _ = routing.balanced_assignments(factor * seen[layer.name], factor * balance, 10)
    if gate == "hard":
        hard = routing.hard_memberships(seen[layer.name], balance, 1)
        expected = routing.straight_through(hard, expected)
    torch.testing.assert_close(seen["assignments"], expected.detach())


def _keep_assignments(layer, seen):
    """Note what the layer hands to its attention."""
    patch = pytest.MonkeyPatch()
    original = hooks.assignments_of

    def watched(call, *arguments):
        assignments = original(call, *arguments)
        if call.router is layer:
            seen["assignments"] = assignments.detach()
        return assignments

    patch.setattr(hooks, "assignments_of", watched)
    return patch
