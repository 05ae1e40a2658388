"""The adapter through every door that transformers and PEFT have."""

from __future__ import annotations

import copy
import importlib
import io
import json
import subprocess
import sys

import pytest
import torch
from peft import AutoPeftModel, AutoPeftModelForCausalLM, LoraConfig, PeftConfig, PeftModel, PeftType, get_peft_model
from transformers import AutoModel, AutoModelForCausalLM, Trainer, TrainingArguments

import focus_hf
from focus_hf.adapter import focus_layers
from focus_hf.adapter.save import save_adapter
from tests.families import BY_DEFAULT, FAMILIES, base_model, focus_config, focus_model, logits, token_ids, unbalance

families = pytest.mark.parametrize("family", FAMILIES)
IDS = token_ids()


@pytest.fixture
def saved(tmp_path, request):
    """Folders of a base model and of an adapter, and the adapter's logits."""
    family = getattr(request, "param", "llama")
    base_model(family).save_pretrained(tmp_path / "base")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), focus_config())
    unbalance(model)
    model.save_pretrained(tmp_path / "adapter")
    return str(tmp_path / "base"), str(tmp_path / "adapter"), logits(model.eval(), IDS)


def by_load_adapter(base, adapter, **kwargs):
    model = AutoModelForCausalLM.from_pretrained(base)
    model.load_adapter(adapter, **kwargs)
    return model


LOADERS = {
    "load_adapter": by_load_adapter,
    "load_adapter, low memory": lambda base, adapter: by_load_adapter(base, adapter, low_cpu_mem_usage=True),
    "load_adapter, trainable": lambda base, adapter: by_load_adapter(base, adapter, is_trainable=True).eval(),
    "AutoModelForCausalLM": lambda base, adapter: AutoModelForCausalLM.from_pretrained(adapter),
    "PeftModel": lambda base, adapter: PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter),
    "PeftModel, low memory": lambda base, adapter: PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), adapter, low_cpu_mem_usage=True
    ),
    "PeftModel, trainable": lambda base, adapter: PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), adapter, is_trainable=True
    ).eval(),
    "AutoPeftModelForCausalLM": lambda base, adapter: AutoPeftModelForCausalLM.from_pretrained(adapter),
}


@pytest.mark.parametrize("saved", BY_DEFAULT, indirect=True)
def test_every_way_of_loading_gives_the_same_logits(saved):
    base, adapter, expected = saved
    for name, load in LOADERS.items():
        assert torch.equal(logits(load(base, adapter), IDS), expected), name


def test_a_headless_model_loads_it_too(saved):
    base, adapter, _ = saved
    whole = AutoModelForCausalLM.from_pretrained(adapter)
    headless = AutoModel.from_pretrained(adapter)
    with torch.no_grad():
        expected = whole.model(input_ids=IDS).last_hidden_state
        torch.testing.assert_close(headless(input_ids=IDS).last_hidden_state, expected)
    assert len(focus_layers(headless)) == 3


def test_auto_peft_model_loads_an_adapter_without_a_task_type(tmp_path):
    """What `push_to_hub` and `train` write names the base model's class, as PEFT's own saving does."""
    base_model("llama").save_pretrained(tmp_path / "base")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), focus_config(task_type=None))
    model.save_pretrained(tmp_path / "stock")
    save_adapter(model, tmp_path / "ours")
    ours, stock = (json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("ours", "stock"))
    assert ours == stock
    loaded = AutoPeftModel.from_pretrained(tmp_path / "ours")
    assert torch.equal(logits(loaded, IDS), logits(model.eval(), IDS))


@pytest.mark.parametrize("family", BY_DEFAULT)
def test_add_adapter_and_save_pretrained_of_a_transformers_model(family, tmp_path):
    base_model(family).save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.add_adapter(focus_config(), "mine")
    unbalance(model)
    expected = logits(model.eval(), IDS)
    model.save_pretrained(tmp_path / "adapter")
    for name, load in LOADERS.items():
        assert torch.equal(logits(load(tmp_path / "base", str(tmp_path / "adapter")), IDS), expected), name


@families
def test_enable_disable_delete_on_a_transformers_model(family, tmp_path):
    focus_model(family).save_pretrained(tmp_path / "adapter")
    model = base_model(family)
    dense = logits(model, IDS)
    model.load_adapter(str(tmp_path / "adapter"))
    sparse = logits(model, IDS)
    model.disable_adapters()
    assert torch.equal(logits(model, IDS), dense)
    model.enable_adapters()
    assert torch.equal(logits(model, IDS), sparse) and not torch.equal(sparse, dense)
    model.delete_adapter("default")
    assert torch.equal(logits(model, IDS), dense)
    model.load_adapter(str(tmp_path / "adapter"))
    assert torch.equal(logits(model, IDS), sparse)


@families
def test_two_adapters_switched_on_one_model(family, tmp_path):
    expected = {}
    for name, changes in {"a": {"num_groups": 4}, "b": {"num_groups": 6, "top_k": 2, "local_window": 5}}.items():
        single = focus_model(family, seed=ord(name), **changes)
        single.save_pretrained(tmp_path / name)
        expected[name] = logits(single, IDS)
    model = base_model(family)
    for name in expected:
        model.load_adapter(str(tmp_path / name), adapter_name=name)
    wrapped = PeftModel.from_pretrained(base_model(family), tmp_path / "a", adapter_name="a")
    wrapped.load_adapter(tmp_path / "b", adapter_name="b")
    for name in ("a", "b", "a"):
        for either in (model, wrapped):
            either.set_adapter(name)
            assert torch.equal(logits(either, IDS), expected[name])
    wrapped.delete_adapter("a")
    wrapped.set_adapter("b")
    assert torch.equal(logits(wrapped, IDS), expected["b"])


@pytest.fixture
def lora_folder(tmp_path):
    torch.manual_seed(3)
    config = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(base_model("llama"), config).eval()
    model.save_pretrained(tmp_path / "lora")
    return str(tmp_path / "lora"), logits(model, IDS)


@pytest.mark.parametrize("order", [("lora", "focus"), ("focus", "lora")])
def test_lora_and_focus_on_one_model(order, lora_folder, tmp_path):
    focus_model("llama").save_pretrained(tmp_path / "focus")
    folders = {"lora": lora_folder[0], "focus": str(tmp_path / "focus")}
    model = base_model("llama")
    for name in order:
        model.load_adapter(folders[name], adapter_name=name)
    model.set_adapter("lora")
    torch.testing.assert_close(logits(model, IDS), lora_folder[1])
    model.set_adapter("focus")
    torch.testing.assert_close(logits(model, IDS), logits(focus_model("llama"), IDS))
    model.set_adapter(["lora", "focus"])
    both = logits(model, IDS)

    # the same function, made another way: LoRA merged into the base, then Focus
    merged = PeftModel.from_pretrained(base_model("llama"), folders["lora"]).merge_and_unload()
    torch.testing.assert_close(
        both, logits(PeftModel.from_pretrained(merged, folders["focus"]), IDS), rtol=1e-4, atol=1e-4
    )
    short = IDS[:, :9]
    model.set_adapter("lora")
    alone = logits(model, short)
    model.set_adapter(["lora", "focus"])
    assert torch.equal(logits(model, short), alone)


@families
def test_gradient_checkpointing_gives_the_same_gradients(family):
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = get_peft_model(base_model(family), focus_config())
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.enable_input_require_grads()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        model.base_model.model.config.attention_dropout = 0.0
        model.train()(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(checkpointed, plain, rtol=1e-4, atol=1e-6)


def test_trainer(tmp_path):
    model = get_peft_model(base_model("llama"), focus_config())
    rows = [{"input_ids": row, "labels": row} for row in token_ids(batch=8, length=40)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=2,
        report_to="none",
        eval_strategy="steps",
        eval_steps=3,
        use_cpu=True,
        save_steps=3,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
    loaded = PeftModel.from_pretrained(base_model("llama"), tmp_path / "checkpoint-3")
    assert torch.equal(logits(loaded, IDS), logits(model.eval(), IDS))


def test_frozen_focus_runs_hard_while_lora_trains(tmp_path):
    """A model trained under an adapter must see the attention that it will be used with."""
    focus_model("llama").save_pretrained(tmp_path / "focus")
    model = base_model("llama")
    model.load_adapter(str(tmp_path / "focus"), adapter_name="focus")
    evaluated = logits(model.eval(), IDS)
    with torch.enable_grad():
        trained = model.train()(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(trained.detach(), evaluated, rtol=1e-4, atol=1e-4)


def test_models_can_be_copied_and_pickled():
    model = focus_model("llama")
    expected = logits(model, IDS)
    twin = copy.deepcopy(model)
    focus_layers(twin)[0].focus_centroids["default"].data.normal_()
    assert torch.equal(logits(model, IDS), expected) and not torch.equal(logits(twin, IDS), expected)
    assert torch.equal(logits(twin.unload(), IDS), logits(base_model("llama"), IDS))
    assert torch.equal(logits(model, IDS), expected)  # the twin's hooks were its own
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert torch.equal(logits(torch.load(buffer, weights_only=False), IDS), expected)


def test_config_round_trips_through_stock_peft(tmp_path):
    config = focus_config(num_groups=5, top_k=3, gate="multiplicative", sink_tokens=0, temperature=0.2)
    config.save_pretrained(tmp_path)
    loaded = PeftConfig.from_pretrained(tmp_path)
    assert isinstance(loaded, focus_hf.FocusConfig) and loaded.to_dict() == config.to_dict()
    assert loaded.peft_type is PeftType.FOCUS and PeftType("FOCUS") is PeftType["FOCUS"]


def test_importing_twice_is_harmless():
    before = PeftType("FOCUS")
    for module in list(sys.modules):
        if module == "focus_hf.adapter":
            importlib.reload(sys.modules[module]).register()
    assert PeftType("FOCUS") is before and list(PeftType).count(before) == 1
    assert logits(focus_model("llama"), IDS).isfinite().all()


def test_a_foreign_package_that_took_the_name_first_is_left_in_place():
    code = """
import warnings
from peft import PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
member = str.__new__(PeftType, "FOCUS"); member._name_ = member._value_ = "FOCUS"
setattr(PeftType, "FOCUS", member)
PeftType._member_map_["FOCUS"] = member; PeftType._value2member_map_["FOCUS"] = member
class ForeignConfig: pass
PEFT_TYPE_TO_CONFIG_MAPPING[member] = ForeignConfig
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import focus_hf
assert any("already has an adapter type FOCUS" in str(w.message) for w in caught)
assert PEFT_TYPE_TO_CONFIG_MAPPING[member] is ForeignConfig
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_merging_says_why_it_cannot_be_done():
    with pytest.raises(ValueError, match="cannot be merged.*unload"):
        focus_model("llama").merge_and_unload()


def test_model_status_and_parameter_report_work():
    model = focus_model("llama")
    status = model.get_model_status()
    assert status.adapter_model_type == "FocusModel" and status.num_adapter_layers == 3
    trainable, total = model.get_nb_trainable_parameters()
    assert trainable == 3 * (16 * 32 + 4 * 16) < total
