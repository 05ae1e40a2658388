"""A cache with a host tier: the tokens of one without, in any room on the device, which stays small.

That it follows everything that happens to a cache is in `test_generate` and `tests/attention/test_store.py`.
"""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import focus_hf
from focus_hf.adapter import host_cache, stored
from focus_hf.attention import TieredPool, store
from tests.adapter.test_heads import heads_model
from tests.families import focus_model, logits, token_ids


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    monkeypatch.setattr(store, "SLACK", 3)
    for module in (store, host_cache):
        monkeypatch.setattr(module, "PAGE", 4)


def model_of(**changes):
    return focus_model("llama", **changes).base_model.model.double()


def generate(model, ids, past, **kwargs):
    options = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=past, **options, **kwargs)


@pytest.mark.parametrize("device_tokens", [4, 8, 400])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("beams", [1, 3])
def test_it_generates_what_a_cache_without_it_does(device_tokens, top_k, beams):
    """Fewer pages than a step reads are read in several rounds."""
    model, ids = model_of(top_k=top_k), token_ids(batch=2, length=40)
    past = focus_hf.FocusCache(model.config, device_tokens)
    result = generate(model, ids, past, num_beams=beams)
    expected = generate(model, ids, DynamicCache(config=model.config), num_beams=beams)
    assert torch.equal(result.sequences, expected.sequences)
    both = (torch.stack(x.logits) for x in (result, expected))
    torch.testing.assert_close(*both, rtol=1e-9, atol=1e-9)
    in_tier = device_tokens < 40
    assert (past.host_tier.layers > 0) == in_tier and (past.host_tier.misses > 0) == in_tier


def test_the_device_stays_small_and_is_asked_once_a_step():
    model, ids = model_of(), token_ids(batch=2, length=200)
    past = focus_hf.FocusCache(model.config, device_tokens=16)
    logits(model, ids[:, :100], past_key_values=past, use_cache=True)
    assert all(isinstance(layer.store.pool, TieredPool) for layer in past.layers)
    tiers = []
    for step in range(100, 200):
        logits(model, ids[:, step : step + 1], past_key_values=past, use_cache=True)
        tiers.append(past.host_tier)
    first, last = tiers[0], tiers[-1]
    assert first.layers == len(past.layers) and not first.other_layers
    assert last.device_bytes == first.device_bytes and last.host_bytes > 1.5 * first.host_bytes
    waits = torch.tensor([tier.waits for tier in tiers]).diff() / len(past.layers)
    assert waits.min() == 1 and waits.median() == 1  # more only where tokens move to their lists
    assert last.hits > 0


@pytest.mark.parametrize("device_tokens", [8, 400])
def test_heads_that_route_for_themselves_have_pages_of_their_own(device_tokens):
    model, ids = heads_model("llama").double(), token_ids(batch=2, length=50)
    past = focus_hf.FocusCache(model.config, device_tokens)
    parts = [logits(model, ids[:, :40], past_key_values=past, use_cache=True)]
    parts += [logits(model, one, past_key_values=past, use_cache=True) for one in ids[:, 40:].split(1, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), logits(model, ids, use_cache=False), rtol=1e-9, atol=1e-9)
    in_tier = [isinstance(getattr(layer.store, "pool", None), TieredPool) for layer in past.layers]
    assert len(in_tier) == 3  # layer 1 has a head that attends to everything, layer 2 has none with groups
    assert in_tier == [device_tokens < 40, False, False]


def test_it_is_off_unless_asked_for(monkeypatch):
    monkeypatch.setattr(stored, "GROUPED_TOKENS_PER_SLAB", 0)
    model, ids = model_of(), token_ids(length=40)
    past = DynamicCache(config=model.config)
    logits(model, ids, past_key_values=past, use_cache=True)
    assert not any(isinstance(layer.store.pool, TieredPool) for layer in past.layers)


def test_layers_that_cannot_use_it_are_counted():
    model, ids = model_of(top_k=4), token_ids(length=40)  # all groups: dense
    past = focus_hf.FocusCache(model.config, device_tokens=4)
    assert past.host_tier == focus_hf.adapter.HostTier()
    logits(model, ids, past_key_values=past, use_cache=True)
    assert past.host_tier == focus_hf.adapter.HostTier(other_layers=len(past.layers))


@pytest.mark.parametrize("device_tokens", [3, 0, -1])
def test_room_for_less_than_a_page(device_tokens):
    with pytest.raises(ValueError, match=rf"device_tokens is {device_tokens}, .* at least 4"):
        focus_hf.FocusCache(model_of().config, device_tokens)
