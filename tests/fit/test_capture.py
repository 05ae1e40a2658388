"""What is captured of a model's attention, over every supported family."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from focus_hf.adapter.targets import find_targets
from focus_hf.fit.capture import capture, read, sampled_positions, write
from focus_hf.fit.estimate import Shapes
from focus_hf.fit.importance import DenseRows, LayerWindow
from tests.families import FAMILIES, base_model, focus_config, logits, token_ids

LENGTH, ROWS = 40, 16

families = pytest.mark.parametrize("family", FAMILIES)


def captured(family, folder, length=LENGTH, rows=ROWS, **options):
    model = base_model(family)
    layers = {module.layer_idx: module for module in find_targets(model, focus_config()).values()}
    ids = token_ids(1, length)[0]
    capture(model, layers, {7: ids}, folder, rows=rows, seed=3, **options)
    return model, layers, ids, {layer: read(folder, 7, layer) for layer in layers}


@families
def test_captured_tensors_are_the_attention_that_the_model_computes(family, tmp_path):
    """The output of captured queries, keys and values, put through the module's own projection, is the module's."""
    model, layers, ids, seen = captured(family, tmp_path, rows=LENGTH)
    for layer, module in layers.items():
        outputs = [DenseRows.of(head).weights @ head.values[0] for head in seen[layer].seen_by(len(seen[layer].keys))]
        mine = torch.cat(outputs).transpose(0, 1).reshape(1, LENGTH, -1)
        projection = next(getattr(module, name) for name in ("o_proj", "c_proj", "dense") if hasattr(module, name))
        found = {}
        handles = [
            projection.register_forward_hook(lambda m, a, out, found=found: found.update(output=out)),
        ]
        logits(model, ids[None])
        for handle in handles:
            handle.remove()
        torch.testing.assert_close(projection(mine), found["output"], rtol=0, atol=2e-2)


@families
def test_gradients_are_those_of_sampled_targets(family, tmp_path):
    model, layers, ids, seen = captured(family, tmp_path)
    again = base_model(family)
    generator = torch.Generator().manual_seed(3 * 1_000_003 + 7)
    positions = sampled_positions(LENGTH, ROWS, generator)
    predicted = logits(again, ids[None])[0]
    targets = torch.multinomial(predicted.softmax(dim=-1), 1, generator=generator)[:, 0]
    layer = max(layers)
    module = {m.layer_idx: m for m in find_targets(again, focus_config()).values()}[layer]
    projection = next(getattr(module, name) for name in ("o_proj", "c_proj", "dense") if hasattr(module, name))
    kept = []
    projection.register_forward_pre_hook(lambda m, args: kept.append(args[0].requires_grad_()) or args)
    again.requires_grad_(False)
    again.get_input_embeddings().register_forward_hook(lambda m, a, out: out.requires_grad_())
    loss = -F.cross_entropy(again(input_ids=ids[None], use_cache=False).logits[0], targets, reduction="sum")
    (expected,) = torch.autograd.grad(loss, kept)
    heads = seen[layer].queries.shape[0]
    expected = expected[0].unflatten(-1, (heads, -1))[positions].transpose(0, 1)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(seen[layer].positions, positions)
    torch.testing.assert_close(seen[layer].gradients, expected, rtol=0, atol=2e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox"])
def test_checkpointing_captures_the_same(family, tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    plain, checkpointed = (
        captured(family, tmp_path / folder, checkpointing=on)[3] for folder, on in (("a", False), ("b", True))
    )
    for layer, window in plain.items():
        for name in ("plain_keys", "keys", "values", "queries", "gradients"):
            torch.testing.assert_close(getattr(window, name), getattr(checkpointed[layer], name))


@families
def test_the_model_is_left_as_it_was(family, tmp_path):
    model, layers, ids, _ = captured(family, tmp_path, checkpointing=True)
    fresh = base_model(family)
    assert torch.equal(logits(model, ids[None]), logits(fresh, ids[None]))
    assert not model.training and all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(type(module.config) is type(model.config) for module in layers.values())
    assert not any(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in layers.values())


def test_plain_keys_do_not_depend_on_positions(tmp_path):
    """The same token at two places: equal before rotation, different after it."""
    model = base_model("llama")
    layers = {m.layer_idx: m for m in find_targets(model, focus_config()).values()}
    ids = torch.full((20,), 5)
    capture(model, {0: layers[0]}, {0: ids}, tmp_path, rows=20, seed=0)
    window = read(tmp_path, 0, 0)
    torch.testing.assert_close(window.plain_keys[:, 2], window.plain_keys[:, 17], rtol=0, atol=1e-2)
    assert (window.keys[:, 2] - window.keys[:, 17]).abs().max() > 0.5
    hidden = []
    handle = layers[0].register_forward_pre_hook(
        lambda m, a, k: hidden.append(a[0] if a else k["hidden_states"]), with_kwargs=True
    )
    logits(model, ids[None])
    handle.remove()
    weights = layers[0].k_proj.weight.view(2, -1, 32)
    expected = torch.einsum("hed,td->hte", weights, hidden[0][0])
    torch.testing.assert_close(window.plain_keys, expected, rtol=0, atol=2e-2)


def test_files_keep_precision_where_numbers_differ_much(tmp_path):
    values = torch.randn(2, 9, 4) * 10 ** torch.randint(-3, 4, (2, 9, 4)).double().float()
    fields = {name: values for name in ("keys", "plain_keys", "values", "queries")}
    fields |= {"gradients": 1e-9 * values, "positions": torch.arange(9), "scale": torch.tensor(0.125)}
    write(tmp_path, 1, 2, {**fields, "softcap": torch.tensor(0.0)})
    window = read(tmp_path, 1, 2)
    assert isinstance(window, LayerWindow) and window.softcap is None and window.scale == 0.125
    torch.testing.assert_close(window.keys, values, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(window.gradients, 1e-9 * values, rtol=1e-3, atol=1e-15)


def test_the_size_of_a_file_is_known_beforehand(tmp_path):
    model, _, _, seen = captured("llama", tmp_path)
    assert (tmp_path / "7-0.safetensors").stat().st_size == pytest.approx(
        Shapes.of(model.config, 1, 0).bytes_of_window(LENGTH, ROWS), rel=0.25
    )


def test_a_full_disk_is_told_in_one_line(tmp_path):
    with pytest.raises(OSError, match="free some space, or name another scratch_dir"):
        write(tmp_path / "missing", 0, 0, {"keys": torch.zeros(2, 2)})


def test_positions_are_spread():
    found = sampled_positions(1000, 10, torch.Generator().manual_seed(0))
    assert (found // 100).tolist() == list(range(10))
    assert torch.equal(sampled_positions(5, 10, torch.Generator()), torch.arange(5))
