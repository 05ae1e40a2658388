"""Nothing but ours is written: what a stranger's file may hold, and what every stock loader makes of it."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.adapter.strangers import LOADERS, Attempt, base_hash, edit_weights, save_base_and_adapter
from tests.families import logits, token_ids

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
ROUTER = "base_model.model.model.layers.0.self_attn.group_router"

#: Names that a file of an adapter must not hold, and shapes with which they would fit into the model.
FOREIGN = {
    f"base_model.model.{Q_PROJ}": (32, 32),
    Q_PROJ: (32, 32),
    f"base_model.{Q_PROJ}": (32, 32),
    "layers.0.self_attn.q_proj.weight": (32, 32),
    "base_model.model.lm_head.weight": (99, 32),
    "base_model.model.model.embed_tokens.weight": (99, 32),
    "model.norm.weight": (32,),
    "base_model.model.model.rotary_emb.inv_freq": (4,),
    "model.rotary_emb.original_inv_freq": (4,),
    f"base_model.model.{Q_PROJ}._extra_state": (1,),
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": (8, 32),
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight": (8, 32),
    "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight": (32, 32),
    "base_model.model.lm_head.modules_to_save.default.weight": (99, 32),
    f"{Q_PROJ}.focus_proj": (32, 32),
    f"{ROUTER}.focus_proj.default": (16, 32),
    f"{ROUTER}.focus_proj.weight": (16, 32),
    f"{ROUTER}.focus_other": (16, 32),
    f"evil.{ROUTER}.focus_proj": (16, 32),
    f"base_model.model.{ROUTER}.focus_proj": (16, 32),
    "focus_proj": (16, 32),
    "": (1,),
    "base_model.model.model.layers.0.\x1b[31mred\x1b[0m\nline": (1,),
}


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """Folders of base and adapter, the base's hash, its logits, and the adapter's."""
    base, adapter = save_base_and_adapter(tmp_path_factory.mktemp("origin"))
    untouched = AutoModelForCausalLM.from_pretrained(base)
    return base, adapter, base_hash(untouched), logits(untouched, token_ids())


@pytest.fixture
def folders(origin, tmp_path):
    (tmp_path / "adapter").mkdir()
    for file in origin[1].iterdir():
        (tmp_path / "adapter" / file.name).write_bytes(file.read_bytes())
    return origin[0], tmp_path / "adapter"


def refused(loader, origin, folders, message):
    """The attempt is refused in one line, and the base model is what it was: weights, attention and all."""
    attempt = Attempt(loader, *folders)
    assert attempt.model is None, "it was loaded"
    assert attempt.is_one_line, repr(attempt.error)
    assert message in str(attempt.error)
    if attempt.base is not None:
        assert base_hash(attempt.base) == origin[2]
        assert not any("group_router" in name for name, _ in attempt.base.named_modules())
        assert torch.equal(logits(attempt.base.eval(), token_ids()), origin[3])
    return attempt


@pytest.mark.parametrize("loader", LOADERS)
def test_a_good_file_changes_nothing_but_the_attention(loader, origin, folders):
    attempt = Attempt(loader, *folders)
    assert attempt.error is None and base_hash(attempt.base) == origin[2]
    assert not torch.equal(logits(attempt.model, token_ids()), origin[3])


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("name", FOREIGN, ids=repr)
def test_a_tensor_that_is_not_the_adapters(name, loader, origin, folders):
    edit_weights(folders[1], lambda tensors: tensors.update({name: torch.full(FOREIGN[name], 7.0)}))
    attempt = refused(loader, origin, folders, "adapter_model.safetensors")
    assert str(attempt.error).isprintable()
    if name.isprintable():  # the tensor is named, or the layer to which it would belong
        assert name in str(attempt.error) or name.rpartition(".")[0] in str(attempt.error)


def of(kind):
    return lambda tensors: next(name for name in sorted(tensors) if name.endswith(kind))


def put(kind, value):
    def change(tensors):
        name = of(kind)(tensors)
        tensors[name] = value(tensors[name])

    return change


def rename(tensors, old, new):
    for name in [name for name in tensors if old in name]:
        tensors[name.replace(old, new)] = tensors.pop(name)


DAMAGE = {
    "wrong shape": (put("focus_centroids", lambda t: torch.zeros(5, 16)), "has shape (5, 16)"),
    "no dimension": (put("focus_balance", lambda t: torch.zeros(())), "has shape ()"),
    "integers": (put("focus_proj", lambda t: t.to(torch.int32)), "expected floating point"),
    "booleans": (put("focus_balance", lambda t: t > 0), "expected floating point"),
    "float8": (put("focus_proj", lambda t: t.to(torch.float8_e4m3fn)), "expected floating point"),
    "complex": (put("focus_proj", lambda t: t.to(torch.complex64)), "expected floating point"),
    "NaN": (put("focus_proj", lambda t: t.fill_(float("nan"))), "holds NaN or infinity"),
    "infinity": (put("focus_balance", lambda t: t.fill_(float("inf"))), "holds NaN or infinity"),
    "a tensor missing": (lambda t: t.pop(of("focus_balance")(t)), "lacks"),
    "a layer missing": (lambda t: [t.pop(n) for n in list(t) if ".2." in n], "layers"),
    "everything missing": (lambda t: [t.pop(n) for n in list(t)], "layers"),
    "a layer that is not there": (lambda t: rename(t, "layers.1.", "layers.99."), "no place"),
    "another attention's": (lambda t: rename(t, "self_attn", "cross_attn"), "no place"),
    "another model's": (lambda t: rename(t, "model.model.", "model.transformer."), "no place"),
    "a layer twice": (
        lambda t: t.update({n.replace("model.model.model.", "model.model."): v.clone() for n, v in t.items()}),
        "layers",
    ),
}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_tensor_is_found_when_it_is_loaded(damage, loader, origin, folders):
    change, message = DAMAGE[damage]
    edit_weights(folders[1], change)
    refused(loader, origin, folders, message)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("size", [0, 3, 8, 200, -100, -1])
def test_a_file_cut_short(size, loader, origin, folders):
    path = folders[1] / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    refused(loader, origin, folders, f"{path} is damaged or cut short")


@pytest.mark.parametrize("loader", LOADERS)
def test_a_pickle_is_never_opened(loader, origin, folders):
    (folders[1] / "adapter_model.safetensors").unlink()
    (folders[1] / "adapter_model.bin").write_bytes(b"\x80\x04not even one")
    refused(loader, origin, folders, "adapter_model.bin, a pickle")


def test_tensors_given_in_memory_are_checked_too(origin, folders):
    base = AutoModelForCausalLM.from_pretrained(folders[0])
    config = PeftModel.from_pretrained(base, folders[1]).peft_config["default"]
    model = AutoModelForCausalLM.from_pretrained(folders[0])
    with pytest.raises(ValueError, match="q_proj.weight"):
        model.load_adapter(peft_config=config, adapter_state_dict={Q_PROJ: torch.zeros(32, 32)})
    assert base_hash(model) == origin[2]


def test_a_refused_file_leaves_the_adapters_that_were_there(origin, folders, tmp_path):
    base, bad = folders
    edit_weights(bad, lambda tensors: tensors.update({Q_PROJ: torch.zeros(32, 32)}))
    wrapped = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), origin[1])
    plain = AutoModelForCausalLM.from_pretrained(base)
    plain.load_adapter(str(origin[1]))
    for model in (wrapped, plain):
        expected = logits(model, token_ids())
        with pytest.raises(ValueError, match="q_proj.weight"):
            model.load_adapter(str(bad), adapter_name="bad")
        assert list(model.peft_config) == ["default"]
        assert torch.equal(logits(model, token_ids()), expected)
        model.load_adapter(str(origin[1]), adapter_name="again")
        model.set_adapter("again")
        assert torch.equal(logits(model, token_ids()), expected)
    with pytest.raises(ValueError, match="q_proj.weight"):  # into an adapter that is in use
        wrapped.load_adapter(str(bad), adapter_name="default")
    wrapped.set_adapter("default")
    assert torch.equal(logits(wrapped, token_ids()), expected)


def test_other_adapters_load_as_they_did(origin, folders, tmp_path):
    """A LoRA adapter on a model that has a Focus adapter."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    lora = LoraConfig(target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    trained = get_peft_model(AutoModelForCausalLM.from_pretrained(folders[0]), lora).eval()
    trained.save_pretrained(tmp_path / "lora")
    model = AutoModelForCausalLM.from_pretrained(folders[0])
    model.load_adapter(str(folders[1]), adapter_name="focus")
    model.load_adapter(str(tmp_path / "lora"), adapter_name="lora")
    model.set_adapter("lora")
    torch.testing.assert_close(logits(model, token_ids()), logits(trained, token_ids()))
