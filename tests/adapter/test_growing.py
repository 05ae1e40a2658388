"""A cache that appends in place is the cache that copies, whatever is done to it and whoever holds its tensors."""

from __future__ import annotations

import copy
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
    new = [torch.randn(layers[0].keys.shape[0], 2, chance.choice((1, 1, 1, 3, 40)), 4) for _ in "kv"]
    for layer in layers:
        layer.update(*new)


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


OPERATIONS = (append, append, append, crop, reorder, repeat, replace, swap)


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
    assert all(torch.equal(tensor, before) for tensor, before in held)


def test_tokens_of_a_routed_call_are_not_copied():
    model = focus_model("llama")
    cache, places = DynamicCache(config=model.config), []
    with torch.no_grad():
        for length in (40, *(1,) * 20):
            model(input_ids=token_ids(length=length), past_key_values=cache)
            places.append(cache.layers[0].keys.data_ptr())
    assert type(cache.layers[0]) is GrowingLayer
    assert len(set(places)) == 1 and cache.get_seq_length() == 60


def test_a_tensor_of_inference_mode_is_left_to_it():
    layer = GrowingLayer()
    new = torch.randn(1, 2, 3, 4)
    with torch.inference_mode():
        layer.update(new, new)
    layer.update(new, new)
    assert torch.equal(layer.keys, torch.cat([new, new], dim=2))


def test_a_gradient_goes_through_it():
    layer, new = GrowingLayer(), torch.randn(1, 2, 3, 4, requires_grad=True)
    layer.update(new, new)
    layer.update(new, new)
    layer.keys.sum().backward()
    assert torch.equal(new.grad, torch.full_like(new, 2.0))


@pytest.mark.parametrize("layer", [DynamicSlidingWindowLayer(8), StaticLayer(16), DynamicLayer()])
def test_other_layers_stay_what_they_are(layer):
    """One that is moved to and fro must not be kept twice."""
    cache, kind = DynamicCache(), type(layer)
    cache.offloading = kind is DynamicLayer
    make_growing(cache, layer)
    assert type(layer) is kind
