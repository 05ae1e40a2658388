"""A cache that appends in place is the cache that copies, whatever is done to it and whoever holds its tensors."""

from __future__ import annotations

import copy
import pickle
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from focus_hf.adapter.growing import GrowingLayer, make_growing
from tests.families import focus_model, token_ids


def append(layers, chance):
    rows = layers[0].keys.shape[0] if layers[0].is_initialized else 2
    kind = torch.float64 if chance.random() < 0.05 else torch.float32
    count = chance.choice((1, 1, 1, 1, 3, 40))
    new = [torch.randn(rows, 2, count, 4, dtype=kind) for _ in "kv"]
    for layer in layers:
        layer.update(*new)


def append_others(layers, chance):
    """Tokens of another number of rows are refused, and the layer is what it was."""
    new = torch.randn(layers[0].keys.shape[0] + 1, 2, 1, 4)
    for layer in layers:
        with pytest.raises(RuntimeError):
            layer.update(new, new)


def reset(layers, chance):
    for layer in layers:
        layer.reset()
    append(layers, chance)


def crop(layers, chance):
    count = -chance.randint(1, max(1, layers[0].keys.shape[2] - 1))
    for layer in layers:
        layer.crop(count)


def reorder(layers, chance):
    rows = torch.tensor([chance.randrange(layers[0].keys.shape[0]) for _ in range(layers[0].keys.shape[0])])
    for layer in layers:
        layer.reorder_cache(rows)


def repeat(layers, chance):
    for layer in layers:
        layer.batch_repeat_interleave(2)
        layer.batch_select_indices(torch.arange(0, layer.keys.shape[0], 2))


def replace(layers, chance):
    for layer in layers:
        layer.keys = layer.keys.clone()


def swap(layers, chance):
    """Views of the same tensor as before, of other tokens."""
    for layer in layers:
        layer.keys = layer.keys.flip(2)
        layer.values = layer.values[:, :, 1:] if layer.values.shape[2] > 1 else layer.values
        layer.keys = layer.keys[:, :, : layer.values.shape[2]]


OPERATIONS = (append, append, append, append, crop, reorder, repeat, replace, swap, append_others, reset)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), inference=st.booleans())
def test_it_is_the_cache_that_copies(seed, inference):
    chance = random.Random(seed)
    torch.manual_seed(seed)
    with torch.inference_mode(inference):
        stock = DynamicLayer()
        stock.update(torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 4))
        growing = copy.deepcopy(stock)
        growing.__class__ = GrowingLayer
        pairs, held = [(growing, stock)], []
        for _ in range(12):
            layers = chance.choice(pairs)
            how = chance.choice((copy.copy, copy.deepcopy, None, None, None))
            if how is not None:  # others go on from here, with the same tensors or their own
                pairs.append(tuple(how(layer) for layer in layers))
            held += [(layer.keys, layer.keys.clone()) for layer in layers]
            chance.choice(OPERATIONS)(layers, chance)
            for ours, theirs in pairs:
                assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
                assert ours.keys.dtype == theirs.keys.dtype
    assert all(torch.equal(tensor, before) for tensor, before in held)


def test_tokens_of_a_routed_call_are_not_copied():
    model = focus_model("llama")
    cache, places = DynamicCache(config=model.config), []
    with torch.no_grad():
        for length in (40, *(1,) * 20):
            model(input_ids=token_ids(length=length), past_key_values=cache)
            places.append(cache.layers[0].keys.data_ptr())
    assert type(cache.layers[0]) is GrowingLayer
    assert len(set(places[1:])) == 1 and cache.get_seq_length() == 60
    cache.reset()
    model(input_ids=token_ids(length=40), past_key_values=cache)
    assert cache.get_seq_length() == 40


def test_a_tensor_of_inference_mode_is_left_to_it():
    layer = GrowingLayer()
    new = torch.randn(1, 2, 1, 4)
    with torch.inference_mode():
        for _ in range(3):
            layer.update(new, new)
    layer.update(new, new)
    assert torch.equal(layer.keys, torch.cat([new] * 4, dim=2))


def test_a_gradient_goes_through_it():
    layer, new = GrowingLayer(), torch.randn(1, 2, 1, 4, requires_grad=True)
    for _ in range(3):
        layer.update(new, new)
    layer.keys.sum().backward()
    assert torch.equal(new.grad, torch.full_like(new, 3.0))


def test_a_gradient_goes_through_what_was_computed_before():
    """Autograd has kept views of the cache that a later token is written behind."""
    layer, query = GrowingLayer(), torch.randn(1, 2, 1, 4, requires_grad=True)
    layer.update(torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4))
    total = 0.0
    for _ in range(3):
        keys, _ = layer.update(torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4))
        total = total + (query @ keys.transpose(-1, -2)).square().sum()
    total.backward()
    assert query.grad.abs().sum() > 0


def test_what_a_copy_and_a_file_hold():
    layer = GrowingLayer()
    for _ in range(8):
        layer.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4))
    for other in (copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert "_rooms" not in vars(other) and torch.equal(other.keys, layer.keys)
    behind = layer.keys.untyped_storage()
    assert set(torch.tensor([], dtype=torch.float32).set_(behind).tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("layer", [DynamicSlidingWindowLayer(8), StaticLayer(16), DynamicLayer()])
def test_other_layers_stay_what_they_are(layer):
    """One that is moved to and fro must not be kept twice."""
    cache, kind = DynamicCache(), type(layer)
    cache.offloading = kind is DynamicLayer
    make_growing(cache, layer)
    assert type(layer) is kind
