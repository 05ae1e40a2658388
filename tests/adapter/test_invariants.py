"""What must always hold, over every supported family."""

from __future__ import annotations

import hashlib

import pytest
import torch
from peft import get_peft_model
from safetensors import safe_open

import focus_hf
from focus_hf.adapter import focus_layers, observe_routing, routing_mode
from focus_hf.attention import PATHS, Problem, Scores, masked_focus_attention
from focus_hf.train import calibrate
from tests.families import (
    CELLS,
    FAMILIES,
    INTERLEAVED,
    ROUTINGS,
    SINKS,
    WINDOW,
    base_model,
    focus_config,
    focus_model,
    logits,
    token_ids,
)

families = pytest.mark.parametrize("family", FAMILIES)
routings = pytest.mark.parametrize("routing", ROUTINGS)


def padding_mask(side: str, batch: int, length: int) -> torch.Tensor:
    mask = torch.ones(batch, length, dtype=torch.long)
    if side == "left":
        mask[0, : length // 3] = 0
    if side == "right":
        mask[0, -(length // 3) :] = 0
    return mask


# -- 1. short means identical --------------------------------------------------------------------------------------


@families
@routings
@pytest.mark.parametrize("length", [1, 2, WINDOW + 1])
def test_short_contexts_are_bit_identical_to_the_base_model(family, routing, length, monkeypatch):
    from focus_hf.adapter import interface

    def must_not_be_called(*args, **kwargs):
        raise AssertionError("a short context left the base model's own attention")

    monkeypatch.setattr(interface, "focus_attention", must_not_be_called)
    ids = token_ids(length=length)
    model = focus_model(family, **ROUTINGS[routing])
    assert torch.equal(logits(model, ids), logits(base_model(family), ids))
    with pytest.raises(AssertionError, match="left the base model's own attention"):
        logits(model, token_ids(length=WINDOW + 2))


@families
@routings
def test_dense_below_leaves_short_contexts_and_first_positions_to_dense_attention(family, routing, monkeypatch):
    from focus_hf.adapter import interface

    ids, below = token_ids(), 30
    model = focus_model(family, dense_below=below, **ROUTINGS[routing])
    dense = logits(base_model(family), ids)
    # A context of that length runs the base model's own attention; in a longer one, the first positions equal it.
    assert torch.equal(logits(model, ids[:, :below]), logits(base_model(family), ids[:, :below]))
    result = logits(model, ids)
    torch.testing.assert_close(result[:, :below], dense[:, :below], rtol=1e-4, atol=1e-4)
    assert (result[:, below + 1 :] - dense[:, below + 1 :]).abs().max() > 1e-4
    monkeypatch.setattr(
        interface, "focus_attention", lambda *args, **kwargs: pytest.fail("not the base model's attention")
    )
    logits(model, ids[:, :below], use_cache=True)


@families
def test_more_than_half_of_the_groups_each_is_dense_attention(family):
    """Any two tokens then share one, and the base model's own attention is the same function."""
    ids = token_ids()
    dense = logits(base_model(family), ids, use_cache=False)
    assert torch.equal(logits(focus_model(family, top_k=3), ids, use_cache=False), dense)
    assert torch.equal(logits(focus_model(family, top_k=3), ids, use_cache=True), dense)
    assert not torch.equal(logits(focus_model(family, top_k=2), ids, use_cache=False), dense)


@families
@routings
def test_longer_contexts_are_not(family, routing):
    ids = token_ids()
    assert (logits(focus_model(family, **ROUTINGS[routing]), ids) - logits(base_model(family), ids)).abs().max() > 1e-4


@families
@routings
@pytest.mark.parametrize("side", ["none", "left"])
def test_disabled_deleted_and_unloaded_adapters_leave_the_base_model(family, routing, side):
    ids, mask = token_ids(), padding_mask(side, 2, 48)
    expected = logits(base_model(family), ids, attention_mask=mask)
    model = focus_model(family, **ROUTINGS[routing])
    with model.disable_adapter():
        assert torch.equal(logits(model, ids, attention_mask=mask), expected)
    assert not torch.equal(logits(model, ids, attention_mask=mask), expected)
    model.delete_adapter("default")  # PEFT cannot run a PeftModel without any adapter, but the model inside it can
    assert torch.equal(logits(model.base_model.model, ids, attention_mask=mask), expected)
    assert torch.equal(logits(focus_model(family, **ROUTINGS[routing]).unload(), ids, attention_mask=mask), expected)


# -- 2. exact ------------------------------------------------------------------------------------------------------


@families
@pytest.mark.parametrize("changes", [{"top_k": 1}, {"top_k": 2}, CELLS], ids=["top_k=1", "top_k=2", "cells"])
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_all_paths_agree(family, changes, side):
    model, ids, mask = focus_model(family, **changes), token_ids(), padding_mask(side, 2, 48)
    results = {}
    for path in PATHS:
        focus_hf.set_routing(model, path=path)
        results[path] = logits(model, ids, attention_mask=mask) * mask[..., None]
    scale = results["masked"].abs().max()
    for path in PATHS:
        assert (results[path] - results["masked"]).abs().max() <= 1e-5 * scale


@families
@routings
def test_an_attention_layer_equals_the_float64_reference(family, routing, monkeypatch):
    """What the registered attention function returned, against the definition on the same q, k, v."""
    from focus_hf.adapter import interface

    calls = []
    original = interface.focus_attention

    def spy(problem, **options):
        output = original(problem, **options)
        doubles = (problem.query.double(), problem.key.double(), problem.value.double())
        scores = Scores(problem.scores.scale, problem.scores.softcap)
        calls.append((output, masked_focus_attention(Problem(*doubles, problem.who, scores))))
        pattern = problem.who.pattern
        assert (pattern.local_window, pattern.sink_tokens) == (WINDOW, SINKS)
        assert bool(problem.who.reads.any()) and not bool(problem.who.reads.all())
        return output

    monkeypatch.setattr(interface, "focus_attention", spy)
    model = focus_model(family, **ROUTINGS[routing])
    logits(model, token_ids(length=60))
    assert len(calls) == len(focus_layers(model))
    for output, expected in calls:
        assert (output - expected).abs().max() <= 1e-5 * expected.abs().max()


@families
@routings
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_the_base_models_way_of_making_masks_does_not_matter(family, routing, side):
    ids, mask = token_ids(), padding_mask(side, 2, 48)
    model, results = focus_model(family, **ROUTINGS[routing]), {}
    for implementation in ("eager", "sdpa", "focus"):
        if family == "gemma2" and implementation == "sdpa":
            continue  # SDPA refuses soft-capping in the base model's own layers
        model.base_model.model.set_attn_implementation(implementation)
        results[implementation] = logits(model, ids, attention_mask=mask) * mask[..., None]
    for result in results.values():
        torch.testing.assert_close(result, results["eager"], rtol=1e-4, atol=1e-4)


@families
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(family, dtype):
    model, ids = focus_model(family), token_ids()
    expected = logits(model, ids)
    half = focus_model(family)
    half.base_model.model.to(dtype)
    result = logits(half, ids)
    assert result.dtype == dtype and torch.isfinite(result).all()
    with model.disable_adapter(), half.disable_adapter():
        dense_error = (logits(half, ids).float() - logits(model, ids)).abs().mean()
    # A rounded hidden state can change a token's group, so single logits may differ; most must not.
    assert (result.float() - expected).abs().median() <= 4 * dense_error + 1e-3


# -- 3. causal -----------------------------------------------------------------------------------------------------


@families
@routings
@pytest.mark.parametrize("path", ["grouped", "native", "masked"])
def test_later_tokens_do_not_change_earlier_logits(family, routing, path):
    model = focus_model(family, **ROUTINGS[routing])
    model = model if path == "native" else model.double()
    focus_hf.set_routing(model, path=path)
    ids = token_ids(batch=1)
    changed = ids.clone()
    changed[:, 30:] = token_ids(batch=1, seed=9)[:, 30:]
    torch.testing.assert_close(logits(model, ids)[:, :30], logits(model, changed)[:, :30], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits(model, ids)[:, :30], logits(model, ids[:, :30]), rtol=1e-4, atol=1e-4)


# -- 5. only centroids travel --------------------------------------------------------------------------------------


def fingerprint(model) -> str:
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if "focus_" not in name:
            digest.update(name.encode() + parameter.detach().numpy().tobytes())
    return digest.hexdigest()


TRAINING = [("hard", False), ("additive", False), ("additive", True), ("multiplicative", False)]


@families
@pytest.mark.parametrize(("gate", "straight_through"), TRAINING)
def test_training_changes_centroids_and_nothing_else(family, gate, straight_through, tmp_path):
    torch.manual_seed(0)
    model = get_peft_model(base_model(family), focus_config(gate=gate, straight_through=straight_through))
    assert {n.split(".")[-2] for n, p in model.named_parameters() if p.requires_grad} == {
        "focus_proj",
        "focus_centroids",
    }
    before = fingerprint(model)
    centroids = [layer.focus_centroids["default"].clone() for layer in focus_layers(model)]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    ids = token_ids(length=40)
    for _ in range(3):
        loss = model.train()(input_ids=ids, labels=ids, use_cache=False).loss
        assert torch.isfinite(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert fingerprint(model) == before
    for layer, old in zip(focus_layers(model), centroids, strict=True):
        assert not torch.equal(layer.focus_centroids["default"], old)
        assert layer.focus_balance["default"].any() and not layer.focus_balance["default"].requires_grad

    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "adapter_model.safetensors", framework="pt") as file:
        names = list(file.keys())
    kinds = [name.rsplit(".", 1)[-1] for name in names]
    assert sorted(kinds) == sorted(["focus_proj", "focus_centroids", "focus_balance"] * len(focus_layers(model)))


# -- 7. balanced ---------------------------------------------------------------------------------------------------


@families
@pytest.mark.parametrize("top_k", [1, 2])
def test_calibration_balances_every_layer(family, top_k):
    model = focus_model(family, top_k=top_k)
    batches = token_ids(batch=16, length=64, seed=3).split(8)
    seen = {}
    largest = calibrate(model, batches)
    with observe_routing(model, lambda layer, scores, m: seen.setdefault(layer.name, []).append(m.flatten(0, 1))):
        for batch in batches:
            logits(model, batch, use_cache=False)
    for name, parts in seen.items():
        share = torch.cat(parts).float().mean(0) / top_k
        assert share.max() <= 1.5 / 4 and share.min() > 0
        assert largest[name] == pytest.approx(share.max().item(), abs=1e-4)


# -- sliding layers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", INTERLEAVED)
def test_sliding_layers_are_left_alone_unless_asked_for(family):
    assert len(focus_layers(focus_model(family))) == 2
    every = focus_model(family, include_sliding_layers=True)
    assert len(focus_layers(every)) == 4
    ids = token_ids()
    whole = logits(every, ids)
    cache, steps = None, []
    for t in range(ids.shape[1]):
        with torch.no_grad():
            output = every(input_ids=ids[:, t : t + 1], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        steps.append(output.logits)
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-3, atol=1e-4)


def test_packed_documents_do_not_see_each_other():
    model = focus_model("llama")
    first, second = token_ids(1, 30, seed=1), token_ids(1, 34, seed=2)
    packed = torch.cat([first, second], dim=1)
    positions = torch.cat([torch.arange(30), torch.arange(34)])[None]
    result = logits(model, packed, position_ids=positions, use_cache=False)
    torch.testing.assert_close(result[:, :30], logits(model, first), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(result[:, 30:], logits(model, second), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("gate", ["additive", "multiplicative", "hard"])
def test_mixed_precision_is_close_to_full(family, gate):
    """Under autocast, where rotary positions leave float32 queries beside bfloat16 values: forward and gradients."""
    model, ids = focus_model(family, gate=gate), token_ids(length=60)
    for layer in focus_layers(model):
        layer.set_adapter("default")  # trainable
    losses, gradients = {}, {}
    for autocast in (False, True):
        for mode in ("hard", "soft"):
            model.zero_grad()
            with routing_mode(model, mode), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            losses[mode, autocast] = loss.item()
        loss.backward()  # of the soft mode
        gradients[autocast] = torch.cat([layer.focus_proj["default"].grad.flatten() for layer in focus_layers(model)])
    for mode in ("hard", "soft"):
        assert losses[mode, True] == pytest.approx(losses[mode, False], rel=0.03)
    assert torch.nn.functional.cosine_similarity(gradients[False], gradients[True], dim=0) > 0.8
