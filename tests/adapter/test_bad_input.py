"""One clear error for each mistake: what was given, what was expected, what to do."""

from __future__ import annotations

import json

import pytest
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import focus_hf
from focus_hf.adapter import focus_layers
from tests.families import FAMILIES, base_model, focus_config, focus_model, logits, token_ids


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_groups": 0}, "num_groups must be an integer from 1 to 1,024, got 0"),
        ({"num_groups": 2.5}, "num_groups must be an integer from 1 to 1,024, got 2.5"),
        ({"num_groups": 4, "top_k": 5}, r"top_k \(5\) cannot exceed num_groups \(4\)"),
        ({"top_k": 0}, "top_k must be an integer from 1 to 1,024, got 0"),
        ({"local_window": -1}, "local_window must be an integer from 0 to 536,870,912, got -1"),
        ({"sink_tokens": -2}, "sink_tokens must be an integer from 0 to 536,870,912, got -2"),
        ({"group_dim": 0}, "group_dim must be an integer from 1 to 1,024, got 0"),
        ({"temperature": 0.0}, "temperature must be a number from 1e-06 to 1,000,000, got 0.0"),
        ({"sharpness": 0}, "sharpness must be a number from 1e-06 to 1,000,000, got 0"),
        ({"gate_strength": -1.0}, "gate_strength must be a number from 0 to 1,000,000, got -1.0"),
        ({"gate": "sigmoid"}, "gate must be one of hard, additive, multiplicative, got 'sigmoid'"),
        ({"format_version": 99}, "format_version 99.*reads up to 1.*Upgrade focus_hf"),
    ],
)
def test_configuration(values, message):
    with pytest.raises(ValueError, match=message):
        focus_hf.FocusConfig(**values)


def test_no_attention_layer():
    class Plain(nn.Module):
        config = LlamaConfig()

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

    with pytest.raises(ValueError, match="Found no attention layer in Plain"):
        get_peft_model(Plain(), focus_config(task_type=None))


def test_an_encoder_given_a_causal_adapter():
    bert = BertModel(BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32))
    with pytest.raises(ValueError, match="BertModel has no causal self-attention.*encoder.*AutoModelForCausalLM"):
        get_peft_model(bert, focus_config(task_type=None))


def test_a_base_that_would_lose_its_soft_capping():
    """What transformers before 5.21 gives by default. Where it is honoured, the family is routed."""
    assert focus_layers(focus_model("gemma2"))
    base = base_model("gemma2")
    base.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match='Gemma2ForCausalLM: .*soft-capping.*attn_implementation="eager"'):
        get_peft_model(base, focus_config())


def test_a_model_of_sliding_layers_only():
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=16,
        max_position_embeddings=128,
    )
    with pytest.raises(ValueError, match="All 2 attention layers.*sliding window.*include_sliding_layers=True"):
        get_peft_model(MistralForCausalLM(config), focus_config())
    model = get_peft_model(MistralForCausalLM(config), focus_config(include_sliding_layers=True))
    assert len(focus_layers(model)) == 2


def test_target_modules_that_match_nothing():
    with pytest.raises(ValueError, match=r"target_modules=\['attn_x'\].*match none.*model.layers.0.self_attn"):
        get_peft_model(base_model("llama"), focus_config(target_modules=["attn_x"]))


def test_target_and_exclude_modules_choose_layers():
    model = get_peft_model(base_model("llama"), focus_config(target_modules=["0.self_attn", "2.self_attn"]))
    assert [layer.name for layer in focus_layers(model)] == ["model.layers.0.self_attn", "model.layers.2.self_attn"]
    model = get_peft_model(base_model("llama"), focus_config(exclude_modules=["1.self_attn"]))
    assert len(focus_layers(model)) == 2


@pytest.fixture
def adapter(tmp_path):
    focus_model("llama").save_pretrained(tmp_path)
    return tmp_path


def load_both_ways(folder, model_of=lambda: base_model("llama")):
    """Yields the two stock loaders; each is expected to fail."""
    yield lambda: model_of().load_adapter(str(folder))
    yield lambda: PeftModel.from_pretrained(model_of(), str(folder))


def other_llama(**changes):
    values = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=99, **{**values, **changes}))


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_base_model(family, tmp_path):
    focus_model(family).save_pretrained(tmp_path)
    wider = "does not fit Llama.*: its hidden_size is 32, the model's is 64"
    for load in load_both_ways(tmp_path, lambda: other_llama(hidden_size=64)):
        with pytest.raises(ValueError, match=wider):
            load()
    deeper = r"does not fit.*its layers is \[.*\], the model's is \[0, 1, 2, 3, 4, 5, \.\.\.\]"
    for load in load_both_ways(tmp_path, lambda: other_llama(num_hidden_layers=7)):
        with pytest.raises(ValueError, match=deeper):
            load()


def edit_config(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_config_from_a_newer_format(adapter):
    edit_config(adapter, format_version=2)
    for load in load_both_ways(adapter):
        with pytest.raises(ValueError, match="format_version 2.*Upgrade"):
            load()


def test_a_config_with_an_impossible_value(adapter):
    edit_config(adapter, top_k=9)
    for load in load_both_ways(adapter):
        with pytest.raises(ValueError, match=r"top_k \(9\) cannot exceed num_groups \(4\)"):
            load()


def test_an_adapter_that_was_never_loaded():
    """Its configuration says that weights will come, and they did not."""
    model = get_peft_model(base_model("llama"), focus_config(inference_mode=True))
    with pytest.raises(ValueError, match="missing or non-finite centroids in model.layers.0.self_attn"):
        logits(model, token_ids())


def test_adapter_file_missing(adapter):
    (adapter / "adapter_model.safetensors").unlink()
    for load in load_both_ways(adapter):  # the libraries' own errors: they look on the Hub next
        with pytest.raises((OSError, ValueError), match="adapter_model|Repo id"):
            load()
    with pytest.raises(focus_hf.records.AdapterFileError, match="adapter_model.safetensors does not exist.*again"):
        focus_hf.records.check_adapter(adapter)


def test_adapter_file_cut_short(adapter):
    path = adapter / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(focus_hf.records.AdapterFileError, match="adapter_model.safetensors is damaged or cut short"):
        focus_hf.records.check_adapter(adapter)


def test_two_focus_adapters_at_once(adapter):
    model = base_model("llama")
    model.load_adapter(str(adapter), adapter_name="a")
    model.load_adapter(str(adapter), adapter_name="b")
    model.set_adapter(["a", "b"])
    with pytest.raises(ValueError, match=r"Two Focus adapters are active at once \(a, b\).*set_adapter"):
        logits(model, token_ids())


def test_set_routing():
    with pytest.raises(ValueError, match="LlamaForCausalLM has no Focus adapter.*load_adapter"):
        focus_hf.set_routing(base_model("llama"), top_k=1)
    model = focus_model("llama")
    for top_k in (0, 5, 1.0):
        with pytest.raises(ValueError, match=r"top_k must be an integer from 1 to num_groups \(4\), got"):
            focus_hf.set_routing(model, top_k=top_k)
    with pytest.raises(ValueError, match="mode must be one of None, soft, hard, local, window, dense, got 'sparse'"):
        focus_hf.set_routing(model, mode="sparse")
    with pytest.raises(ValueError, match="path must be one of auto, triton, .*masked, got 'flash'"):
        focus_hf.set_routing(model, path="flash")
    for dense_below in (-1, 64.0, "64", True):
        with pytest.raises(ValueError, match="set_routing: dense_below must be an integer from 0"):
            focus_hf.set_routing(model, top_k=2, dense_below=dense_below)
    with pytest.raises(ValueError, match="gate_strength must not be negative"):
        focus_hf.set_routing(model, gate_strength=-1)
    with model.disable_adapter(), pytest.warns(UserWarning, match="not active"):
        focus_hf.set_routing(model, mode="hard")


def test_soft_mode_cannot_continue_a_cache():
    model = focus_model("llama")
    focus_hf.set_routing(model, mode="soft")
    with pytest.raises(ValueError, match='Soft routing looks at whole sequences.*mode="hard"'):
        model.generate(token_ids(), max_new_tokens=2)


@pytest.mark.parametrize("other", ({"pairs": 0.3}, {"threshold": 2.0}, {"length": 512}), ids=str)
def test_two_dials_at_once_are_refused(other):
    model = focus_model("llama")
    before = [layer.configs["default"].to_dict() for layer in focus_layers(model)]
    with pytest.raises(ValueError, match=r"Give top_k \(1\) or (pairs|threshold|length)=.*, not both"):
        focus_hf.set_routing(model, top_k=1, **other)
    assert [layer.configs["default"].to_dict() for layer in focus_layers(model)] == before
