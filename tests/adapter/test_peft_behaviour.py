"""What PEFT offers for adapters of any type: each works with Focus, or says in one line that it does not."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from peft.utils.hotswap import hotswap_adapter

from focus_hf.adapter import focus_layers
from tests.families import FAMILIES, base_model, focus_model, logits, token_ids

IDS = token_ids()


@pytest.fixture
def two(tmp_path):
    """Folders of two adapters, and a model that has both, the first one active."""
    for name in ("a", "b"):
        focus_model("llama", seed=ord(name)).save_pretrained(tmp_path / name)
    model = PeftModel.from_pretrained(base_model("llama"), tmp_path / "a", adapter_name="a")
    model.load_adapter(tmp_path / "b", adapter_name="b")
    return tmp_path / "a", tmp_path / "b", model


def test_a_batch_of_the_active_adapter(two):
    model = two[2]
    assert torch.equal(logits(model, IDS, adapter_names=["a", "a"]), logits(model, IDS))
    model.set_adapter("b")
    assert torch.equal(logits(model, IDS, adapter_names=["b", "b"]), logits(model, IDS))


@pytest.mark.parametrize("names", [["a", "b"], ["b", "b"], ["a", "__base__"]])
def test_a_batch_that_mixes_adapters_is_refused(two, names):
    model = two[2]
    with pytest.raises(ValueError, match="a batch cannot mix Focus adapters.*set_adapter") as caught:
        logits(model, IDS, adapter_names=names)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="a batch cannot mix Focus adapters"):
        model.generate(IDS, max_new_tokens=2, adapter_names=names)


def test_a_transformers_model_refuses_mixed_batches_too(two):
    model = base_model("llama")
    for name, folder in zip("ab", two[:2], strict=True):
        model.load_adapter(str(folder), adapter_name=name)
    model.set_adapter("a")
    with pytest.raises(ValueError, match="a batch cannot mix Focus adapters, and 'b' is not the active one"):
        logits(model, IDS, adapter_names=["a", "b"])


def test_hot_swapping_is_refused_and_changes_nothing(two):
    _, other, model = two
    expected = logits(model, IDS)
    with pytest.raises(ValueError, match="[Hh]otswapping.*LORA"):
        hotswap_adapter(model, str(other), adapter_name="a")
    assert torch.equal(logits(model, IDS), expected)
    plain = base_model("llama")
    plain.enable_peft_hotswap()
    plain.load_adapter(str(two[0]), adapter_name="a")
    for hotswap in (True, "auto"):
        with pytest.raises(ValueError, match="[Hh]otswapping.*LoRA"):
            plain.load_adapter(str(other), adapter_name="a", hotswap=hotswap)
    assert torch.equal(logits(plain, IDS), expected)


def test_low_cpu_mem_usage_of_a_second_adapter(two):
    first, other, model = two
    plain = base_model("llama")
    wrapped = PeftModel.from_pretrained(base_model("llama"), first, adapter_name="a", low_cpu_mem_usage=True)
    plain.load_adapter(str(first), adapter_name="a", low_cpu_mem_usage=True)
    for name, either in (("b", plain), ("b", wrapped)):
        either.load_adapter(str(other), adapter_name=name, low_cpu_mem_usage=True)
        either.set_adapter(name)
        model.set_adapter(name)
        assert torch.equal(logits(either, IDS), logits(model, IDS))
        assert not any(parameter.is_meta for parameter in either.parameters())


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def balances(model):
    return torch.cat([layer.focus_balance["default"].detach() for layer in focus_layers(model)])


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_in_eval_mode_are_those_of_training(family):
    """The hard gate has inference's value, so eval mode, which switches dropout off, can give them too."""
    found = []
    for training in (True, False):
        model = focus_model(family).train(training)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        model.get_base_model().config.attention_dropout = 0.0
        before = balances(model)
        model(input_ids=IDS, labels=IDS).loss.backward()
        found.append(gradients(model))
        assert torch.equal(balances(model), before) is not training  # balance moves in training alone
    assert found[0].keys() == found[1].keys() and found[0]
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6)
        assert gradient.abs().sum() > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_eval_mode_gives_the_same_logits_with_and_without_gradients(family):
    model = focus_model(family)
    torch.testing.assert_close(model(input_ids=IDS).logits, logits(model, IDS), rtol=1e-4, atol=1e-4)


def test_a_cache_filled_with_gradients_is_continued_as_one_filled_without():
    model = focus_model("llama")
    whole = logits(model, IDS)
    for length in (5, 30):  # within the window, where attention is dense, and beyond
        start = model(input_ids=IDS[:, :length], use_cache=True)
        rest = model(input_ids=IDS[:, length:], past_key_values=start.past_key_values, use_cache=True)
        torch.testing.assert_close(rest.logits, whole[:, length:], rtol=1e-4, atol=1e-4)
        model(input_ids=IDS[:, -1:], past_key_values=rest.past_key_values)


@pytest.mark.parametrize("gate", ["additive", "multiplicative"])
def test_eval_mode_of_a_soft_gate_is_inference(gate):
    """Its training computes another function: eval mode must not."""
    model = focus_model("llama", gate=gate)
    torch.testing.assert_close(model(input_ids=IDS).logits, logits(model, IDS), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(model.train()(input_ids=IDS).logits, logits(model.eval(), IDS), rtol=1e-3, atol=1e-3)
