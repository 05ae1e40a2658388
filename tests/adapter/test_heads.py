"""Adapters whose heads attend in different ways: what must always hold, over every supported family."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, DynamicCache

import focus_hf
from focus_hf.adapter import focus_layers, hard, observe_routing, stored
from focus_hf.adapter.heads import head_classes, top_ks_by_head
from focus_hf.attention import TokensGone, store
from focus_hf.bench.stand_in import FlashStandIn
from tests.families import FAMILIES, INTERLEAVED, WINDOW, base_model, focus_config, logits, token_ids

families = pytest.mark.parametrize("family", FAMILIES)
routings = pytest.mark.parametrize("routing", ["per_head", "shared"])

#: The layers that are routed, by number, have heads of every kind.
PATTERNS = {
    "0.0": {"attend": "window", "local_window": WINDOW + 4},
    "1.0": {"attend": "everything"},
    "1.1": {"attend": "groups", "top_k": 1, "local_window": WINDOW},
    "2.0": {"attend": "window"},
    "2.1": {"attend": "window", "local_window": WINDOW + 1},
    "3.0": {"attend": "groups", "top_k": 2},
}


def heads_model(family: str, routing: str = "per_head", seed: int = 3, **changes: Any) -> Any:
    base = base_model(family)
    torch.manual_seed(seed)
    model = get_peft_model(base, focus_config(routing=routing, head_patterns=PATTERNS, **changes)).eval()
    for layer in focus_layers(model):
        for kind in (layer.focus_balance, layer.focus_query_bias):
            for values in kind.values():
                values.data.normal_(std=2.0)
    return model


@pytest.fixture(params=["plain", "by groups", "on a device", "in host memory"])
def storage(request: Any, monkeypatch: Any) -> str:
    """A cache as it comes, or with a row for each head, read as on a CPU or by a stand-in for CUDA's kernels.

    The last one has its lists in host memory, and on the device room for less than a step reads.
    """
    if request.param in ("on a device", "in host memory"):
        if request.node.callspec.params.get("family", "llama") not in ("llama", "gpt2"):
            pytest.skip("some families will do")
        monkeypatch.setattr(hard, "find_kernel", lambda query, value: FlashStandIn())
    if request.param != "plain":
        monkeypatch.setattr(stored, "GROUPED_TOKENS_BY_HEAD", 0)
        monkeypatch.setattr(store, "SLACK", 3)
        monkeypatch.setattr(store, "PAGE", 4)
    if request.param == "in host memory":
        monkeypatch.setattr(DynamicCache, "device_tokens", 8, raising=False)
    return str(request.param)


@families
@routings
def test_short_contexts_and_a_disabled_adapter_are_the_base_model_bit_for_bit(family: str, routing: str) -> None:
    model, base = heads_model(family, routing), base_model(family)
    short, long = token_ids(length=WINDOW + 1), token_ids()
    assert torch.equal(logits(model, short), logits(base, short))
    assert (logits(model, long) - logits(base, long)).abs().max() > 1e-4
    with model.disable_adapter():
        assert torch.equal(logits(model, long), logits(base, long))


@families
@routings
def test_every_path_is_the_definition(family: str, routing: str) -> None:
    model, ids = heads_model(family, routing).double(), token_ids()
    mask = torch.ones_like(ids)
    mask[0, -5:] = 0  # on the left, Gemma-2's own attention gives NaN in float64
    focus_hf.set_routing(model, path="masked")
    expected = logits(model, ids, attention_mask=mask)
    for path in ("auto", "grouped", "lookup", "biased"):  # by itself a model would not take all at this length
        focus_hf.set_routing(model, path=path)
        found = logits(model, ids, attention_mask=mask)
        torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-8, atol=1e-8)


@families
@routings
def test_causal(family: str, routing: str) -> None:
    model, ids = heads_model(family, routing), token_ids()
    other = ids.clone()
    other[:, 30:] = token_ids(seed=5)[:, 30:]
    torch.testing.assert_close(logits(model, ids)[:, :30], logits(model, other)[:, :30], rtol=1e-4, atol=1e-4)


@families
@routings
def test_decoding_is_prefill(family: str, routing: str, storage: str) -> None:
    decoding_is_prefill(heads_model(family, routing))


def test_heads_that_need_their_window_only_keep_no_more(storage: str) -> None:
    """Layers 0 and 2 have such heads; in float64 what is decoded is the definition, however the layers are stored."""
    model, ids = heads_model("llama").double(), token_ids(length=60)
    past = DynamicCache(config=model.config)
    for start, stop in ((0, 40), (40, 50), *((i, i + 1) for i in range(50, 60))):
        with torch.no_grad():
            found = model(input_ids=ids[:, start:stop], past_key_values=past, use_cache=True).logits[:, -1]
    torch.testing.assert_close(found, logits(model, ids)[:, -1], rtol=1e-9, atol=1e-9)
    if storage == "plain":
        return
    assert [layer.store.tokens_gone for layer in past.layers] == [True, False, True]
    kept = [layer.store.recent.positions.shape[1] + layer.store.pool.positions.shape[1] for layer in past.layers]
    assert kept[2] < 60 / 2  # two windows, whatever the length
    with pytest.raises(TokensGone, match="keeps of some heads their window only"), model.disable_adapter():
        logits(model, ids[:, :1], past_key_values=past, use_cache=True)


def test_a_path_that_keeps_everything(storage: str) -> None:
    model, ids = heads_model("llama"), token_ids(length=40)
    focus_hf.set_routing(model, path="masked")
    past = DynamicCache(config=model.config)
    logits(model, ids, past_key_values=past, use_cache=True)
    past.crop(-30)
    expected = logits(model, ids[:, :11])[:, -1]
    found = logits(model, ids[:, 10:11], past_key_values=past, use_cache=True)[:, -1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@routings
def test_decoding_with_more_groups_than_bits_of_a_number(routing: str, storage: str) -> None:
    decoding_is_prefill(heads_model("llama", routing, num_groups=70))


def decoding_is_prefill(model: Any) -> None:
    """Token by token, and in chunks, through the cache."""
    ids = token_ids(length=40)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    whole = logits(model, ids, attention_mask=mask)
    cache, parts = None, []
    for start, stop in [(0, 21), (21, 29), *((i, i + 1) for i in range(29, 40))]:
        with torch.no_grad():
            step = model(
                input_ids=ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache, use_cache=True
            )
        cache = step.past_key_values
        parts.append(step.logits)
    found = torch.cat(parts, dim=1)
    torch.testing.assert_close(found[mask.bool()], whole[mask.bool()], rtol=1e-3, atol=1e-3)


@families
@routings
def test_beams_follow_the_cache(family: str, routing: str, storage: str) -> None:
    model, ids = heads_model(family, routing), token_ids(length=24)
    beams = model.generate(input_ids=ids, max_new_tokens=6, num_beams=3, do_sample=False)
    assert torch.equal(
        beams, model.generate(input_ids=ids, max_new_tokens=6, num_beams=3, do_sample=False, use_cache=False)
    )


@routings
def test_assisted_decoding_crops_the_cache(routing: str, storage: str) -> None:
    model, ids = heads_model("llama", routing), token_ids(length=24)[:1]
    options = {"max_new_tokens": 16, "do_sample": False}
    alone = model.generate(input_ids=ids, use_cache=False, **options)
    assert torch.equal(alone, model.generate(input_ids=ids, prompt_lookup_num_tokens=2, **options))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@routings
def test_a_round_trip_through_every_loader_changes_nothing(family: str, routing: str, tmp_path: Any) -> None:
    base = base_model(family)
    base.save_pretrained(tmp_path / "base")
    model, ids = heads_model(family, routing), token_ids()
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    expected = logits(model, ids)
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(base_model(family), tmp_path / "adapter")
    assert torch.equal(logits(loaded.eval(), ids), expected)
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    other.load_adapter(str(tmp_path / "adapter"))
    assert torch.equal(logits(other.eval(), ids), expected)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "adapter").eval(), ids), expected)


def test_only_heads_with_groups_have_centroids() -> None:
    layers = focus_layers(heads_model("llama"))
    assert [tuple(layer.focus_centroids["default"].shape) for layer in layers[:2]] == [(1, 4, 16), (1, 4, 16)]
    assert not layers[2].tensors_of("default")


def test_budgets_are_chosen_by_their_share() -> None:
    everything = {f"{layer}.{head}": {"attend": "everything"} for layer in range(3) for head in range(2)}
    model = heads_model("llama", budgets={"1.0": everything, "0.3": PATTERNS})
    ids, dense = token_ids(), logits(base_model("llama"), token_ids())
    sparse = logits(model, ids)
    focus_hf.set_routing(model, pairs=1.0)
    torch.testing.assert_close(logits(model, ids), dense, rtol=1e-4, atol=1e-4)
    focus_hf.set_routing(model, pairs="0.3")
    assert torch.equal(logits(model, ids), sparse)
    with pytest.raises(ValueError, match=r"pairs must be one of this adapter's budgets \(0.3, 1.0\), got 0.5"):
        focus_hf.set_routing(model, pairs=0.5)
    focus_hf.set_routing(model, top_k=4)
    config = focus_layers(model)[0].routing_config
    assert config.head_pattern(1, 1).top_k == 4 and config.head_pattern(0, 1).top_k == 4


def test_observers_see_each_head_with_groups() -> None:
    model, seen = heads_model("llama"), {}
    with observe_routing(model, lambda layer, scores, groups: seen.update({layer.name: groups})):
        logits(model, token_ids())
    assert list(seen) == ["model.layers.0.self_attn.1", "model.layers.1.self_attn.1"]
    assert all((groups.sum(-1) == 1).all() for groups in seen.values())


def test_training_by_gradient_is_refused() -> None:
    model = heads_model("llama").train()
    with pytest.raises(ValueError, match="is fitted"):
        model(input_ids=token_ids())


def test_bad_patterns_are_named() -> None:
    for patterns in ({"a.b": {"attend": "window"}}, {"0.0": {"attend": "half"}}, {"0.0": {"local_window": 3}}):
        with pytest.raises(ValueError, match="head_patterns must be a mapping"):
            focus_config(head_patterns=patterns)
    with pytest.raises(ValueError, match=r"top_k of head 0.1 \(9\) cannot exceed num_groups \(4\)"):
        focus_config(head_patterns={"0.1": {"attend": "groups", "top_k": 9}})
    with pytest.raises(ValueError, match="names head 0.7"):
        get_peft_model(base_model("llama"), focus_config(head_patterns={"0.7": {"attend": "window"}}))


def test_compiled_is_eager() -> None:
    model, ids = heads_model("llama"), token_ids()
    expected = logits(model, ids, use_cache=False)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(input_ids=ids, use_cache=False).logits, expected)


def test_interleaved_families_are_routed_in_their_full_layers_only() -> None:
    for family in INTERLEAVED:
        assert [layer.layer_idx for layer in focus_layers(heads_model(family))] == [1, 3]


def test_what_follows_from_settings_follows_their_changes() -> None:
    """It is made once, and anew for each setting that is given another value."""
    everything = {name: {"attend": "everything"} for name in PATTERNS}
    model = heads_model("llama", budgets={"1.0": everything, "0.3": PATTERNS})
    config = focus_layers(model)[0].routing_config
    seen = [head_classes(config, 1)]
    assert head_classes(config, 1) is seen[0] and top_ks_by_head(config, 1) is top_ks_by_head(config, 1)
    for change in (
        lambda: focus_hf.set_routing(model, pairs=1.0),
        lambda: focus_hf.set_routing(model, pairs=0.3),
        lambda: focus_hf.set_routing(model, top_k=3),
        lambda: setattr(config, "sink_tokens", 1),
        lambda: setattr(config, "dense_below", 9),
    ):
        change()
        fresh = copy.deepcopy(config)
        fresh.__dict__.pop("_made", None)
        assert head_classes(config, 1) == head_classes(fresh, 1) != seen[-1]
        assert top_ks_by_head(config, 1) == top_ks_by_head(fresh, 1)
        seen.append(head_classes(config, 1))
    assert "_made" not in config.to_dict() and copy.deepcopy(config) == config
