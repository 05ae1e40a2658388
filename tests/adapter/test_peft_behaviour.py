"""What PEFT offers for adapters of any type: each works with Focus, or says in one line that it does not."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from peft.utils.hotswap import hotswap_adapter

from tests.families import base_model, focus_model, logits, token_ids

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
