"""A cache that grows in place is `torch.cat` to whoever looks, and nothing that was handed out changes."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from focus_hf.adapter import room
from focus_hf.adapter.room import Room, can_share
from tests.families import focus_model, token_ids

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 9)),
        st.tuples(st.just("crop"), st.integers(1, 5)),
        st.tuples(st.sampled_from(["reorder", "fork", "inference"]), st.just(0)),
    ),
    max_size=30,
)


@given(steps=STEPS, dim=st.sampled_from([1, -2]), at_least=st.integers(0, 8))
def test_every_result_is_a_concatenation_and_stays_what_it_was(steps, dim, at_least):
    torch.manual_seed(0)
    rest = [room.AT_LEAST]
    room.AT_LEAST = at_least
    try:
        shape = (2, 3, 5, 4) if dim == -2 else (2, 5, 4)
        own, held, given_out = Room(), torch.randn(shape), []
        expected, inference = held.clone(), False
        for what, count in steps:
            if what == "crop":
                held = held.narrow(dim, 0, max(held.shape[dim] - count, 1))
            elif what == "reorder":
                held = held.flip(0)
            elif what == "inference":
                inference = not inference
            elif what == "fork":  # somebody else goes on from here, with the same memory
                other = own.append(held, torch.full_like(held.narrow(dim, 0, 1), 9.0), dim)
                given_out.append((other, other.clone()))
            expected = held.clone()
            if what == "append":
                new = torch.randn_like(held.narrow(dim, 0, 1).repeat_interleave(count, dim))
                with torch.inference_mode(inference), torch.no_grad():
                    held = own.append(held, new, dim)
                expected = torch.cat([expected, new], dim)
            assert torch.equal(held, expected)
            given_out.append((held, expected))
        assert all(torch.equal(*pair) for pair in given_out)
    finally:
        room.AT_LEAST = rest[0]


def test_what_is_held_stays_where_it_is_until_there_is_no_room():
    own, held = Room(), torch.randn(1, 2, 100, 4)
    places = set()
    for _ in range(2 * room.AT_LEAST):
        held = own.append(held, torch.randn(1, 2, 1, 4), -2)
        places.add(held.data_ptr())
    assert held.shape[2] == 100 + 2 * room.AT_LEAST and len(places) == 2


def test_gradients_and_other_dtypes_are_left_to_torch():
    one = torch.zeros(1, 2)
    with torch.no_grad():
        assert can_share(one, one)
        assert not can_share(one, one.half()) and not can_share(one, torch.nn.Parameter(one))
    with torch.inference_mode():
        assert can_share(one, one)
    assert not can_share(one, one)


@pytest.fixture(scope="module")
def model():
    return focus_model("llama").base_model.model


def steps(model, cache, ids):
    with torch.no_grad():
        return [model(input_ids=token[None, None], past_key_values=cache).logits for token in ids]


def cache_of(model, ids):
    """With 40 tokens at once in it."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[:, :40], past_key_values=cache)
    return cache


def test_tokens_go_behind_those_of_the_cache(model):
    ids = token_ids(length=60)[:1]
    cache = cache_of(model, ids)
    steps(model, cache, ids[0, 40:41])
    layer = cache.layers[0]
    places = [tensor.data_ptr() for tensor in (layer.keys, layer.values)]
    logits = steps(model, cache, ids[0, 41:])
    assert places == [tensor.data_ptr() for tensor in (layer.keys, layer.values)]
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits[:, 41:]
    torch.testing.assert_close(torch.cat(logits, dim=1), whole, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("copied", ["deep", "layers"])
def test_two_sequences_go_on_from_one_cache(model, copied):
    """Copies, also such as share their tensors, do not write into each other."""
    ids = token_ids(length=60)
    cache = cache_of(model, ids[:1])
    steps(model, cache, ids[0, 40:44])
    if copied == "deep":
        other = copy.deepcopy(cache)
    else:
        other = copy.copy(cache)
        other.layers = [copy.copy(layer) for layer in cache.layers]
    here, there = steps(model, cache, ids[0, 44:48]), steps(model, other, ids[1, 44:48])
    here += steps(model, cache, ids[0, 48:52])
    there += steps(model, other, ids[1, 48:52])
    for row, logits in enumerate((here, there)):
        whole_ids = torch.cat([ids[:1, :44], ids[row : row + 1, 44:52]], dim=1)
        with torch.no_grad():
            whole = model(input_ids=whole_ids, use_cache=False).logits[:, 44:]
        torch.testing.assert_close(torch.cat(logits, dim=1), whole, rtol=1e-3, atol=2e-4)


def test_a_cache_is_used_with_and_without_inference_mode(model):
    ids = token_ids(length=60)[:1]
    cache = DynamicCache(config=model.config)
    logits = []
    for start, mode in ((0, torch.inference_mode()), (40, torch.no_grad()), (44, torch.inference_mode())):
        with mode:
            for at in [40] if not start else range(start, start + 4):
                some = ids[:, :at] if not start else ids[:, at : at + 1]
                logits.append(model(input_ids=some, past_key_values=cache).logits)
    logits.append(steps(model, cache, ids[0, 48:52])[-1])
    with torch.no_grad():
        whole = model(input_ids=ids[:, :52], use_cache=False).logits
    torch.testing.assert_close(logits[-1][:, -1], whole[:, -1], rtol=1e-3, atol=2e-4)


def test_memory_is_let_go_with_what_it_held(model):
    ids = token_ids(length=60)[:1]
    cache = cache_of(model, ids)
    steps(model, cache, ids[0, 40:44])
    layer = cache.layers[0]
    assert layer.rooms
    layer.offload()
    assert layer.rooms is None
    steps(model, cache, ids[0, 44:46])
    assert layer.rooms
    cache.reset()
    assert layer.rooms is None
