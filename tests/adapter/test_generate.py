"""Decode equals prefill: generation through the cache gives the logits of one full forward."""

from __future__ import annotations

import copy
import pickle
import sys

import pytest
import torch
from transformers import DynamicCache, StaticCache

import focus_hf
from focus_hf.adapter import focus_layers, routers
from tests.families import FAMILIES, ROUTINGS, WINDOW, base_model, focus_model, logits, token_ids

families = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(autouse=True, params=list(ROUTINGS))
def routing(request):
    """Everything holds for both kinds of routing."""
    return request.param


@pytest.fixture(autouse=True)
def _settings(routing, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "_CHANGES", ROUTINGS[routing])


#: What makes the models of a test route as it wants.
_CHANGES = {}

CLOSE = {"rtol": 1e-3, "atol": 2e-4}


def model_of(family, **changes):
    """The wrapped transformers model, as users of ``load_adapter`` hold it."""
    changes = {**_CHANGES, **changes}
    if _CHANGES:  # by cells
        changes.pop("top_k", None)
    model = focus_model(family, **changes).base_model.model
    # Rounding may put a score on the other side of a threshold: in float64 it happens to none of these.
    return model.double() if _CHANGES else model


def generate(model, ids, **kwargs):
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    mask = kwargs.pop("attention_mask", torch.ones_like(ids))
    return model.generate(ids, attention_mask=mask, **{**options, **kwargs})


def assert_is_what_a_full_forward_gives(model, result, prompt_length, mask=None):
    """Every logit that generation saw equals the one of a forward over the whole sequence, without a cache."""
    sequences = result.sequences
    if mask is not None:
        mask = torch.cat([mask, torch.ones_like(sequences[:, prompt_length:])], dim=1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        whole = logits(model, sequences, attention_mask=mask, position_ids=positions, use_cache=False)
    else:
        whole = logits(model, sequences, use_cache=False)
    seen = torch.stack(result.logits, dim=1)
    torch.testing.assert_close(seen, whole[:, prompt_length - 1 : -1].to(seen.dtype), **CLOSE)


@families
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("length", [WINDOW - 4, 40])  # grows out of the window while generating, or starts beyond
def test_greedy(family, top_k, cache, length):
    model, ids = model_of(family, top_k=top_k), token_ids(length=length)
    kwargs = {"cache_implementation": "static"} if cache == "static" else {}
    assert_is_what_a_full_forward_gives(model, generate(model, ids, **kwargs), length)


@families
def test_greedy_in_mixed_precision(family):
    """Autocast mixes dtypes, also within a cache, and may begin in the middle: the same to within bfloat16.

    Its rounding may now and then put a token on the edge between two groups into the other one.
    """
    model, ids = model_of(family).float(), token_ids(length=40)
    with torch.autocast("cpu", torch.bfloat16):
        result = generate(model, ids)
        whole = logits(model, result.sequences, use_cache=False)
    seen = torch.stack(result.logits, dim=1)
    assert torch.isclose(seen.float(), whole[:, 39:-1].float(), rtol=0.1, atol=0.3).float().mean() > 0.9
    past = DynamicCache(config=model.config)
    logits(model, ids, past_key_values=past, use_cache=True)
    with torch.autocast("cpu", torch.bfloat16):
        late = logits(model, result.sequences[:, 40:], past_key_values=past, use_cache=True)
    assert torch.isclose(late[:, :-1].float(), whole[:, 40:-1].float(), rtol=0.1, atol=0.3).float().mean() > 0.9


@families
def test_sampling(family):
    model, ids = model_of(family), token_ids(length=20)
    torch.manual_seed(7)
    result = generate(model, ids, do_sample=True, temperature=1.5)
    assert_is_what_a_full_forward_gives(model, result, 20)


@families
def test_several_returned_sequences(family):
    model, ids = model_of(family), token_ids(length=20)
    torch.manual_seed(7)
    result = generate(model, ids, do_sample=True, num_return_sequences=3)
    assert result.sequences.shape[0] == 6
    assert_is_what_a_full_forward_gives(model, result, 20)


@families
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_beam_search(family, cache):
    model, ids = model_of(family), token_ids(length=20)
    kwargs = {"cache_implementation": "static"} if cache == "static" else {}
    with_cache = generate(model, ids, num_beams=4, num_return_sequences=2, output_scores=True, **kwargs)
    without = generate(model, ids, num_beams=4, num_return_sequences=2, output_scores=True, use_cache=False)
    assert torch.equal(with_cache.sequences, without.sequences)
    torch.testing.assert_close(with_cache.sequences_scores, without.sequences_scores, **CLOSE)


@families
def test_assisted_decoding_gives_the_greedy_tokens(family):
    model, ids = model_of(family), token_ids(batch=1, length=24)
    assistant = base_model(family).to(model.dtype)
    greedy = generate(model, ids, max_new_tokens=20).sequences
    assert torch.equal(generate(model, ids, max_new_tokens=20, assistant_model=assistant).sequences, greedy)
    # and the assistant may have an adapter of its own
    assistant = model_of(family, seed=5)
    assert torch.equal(generate(model, ids, max_new_tokens=20, assistant_model=assistant).sequences, greedy)


@families
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_left_padded_batches_of_different_lengths(family, cache):
    model = model_of(family)
    if family == "gemma2":
        model.float()  # its eager attention gives NaN to padding in float64
    texts = [token_ids(1, n, seed=n) for n in (30, 17, 6)]
    length = max(text.shape[1] for text in texts)
    ids = torch.zeros(3, length, dtype=torch.long)
    mask = torch.zeros(3, length, dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, length - text.shape[1] :] = text
        mask[row, length - text.shape[1] :] = 1
    kwargs = {"cache_implementation": "static"} if cache == "static" else {}
    batch = generate(model, ids, attention_mask=mask, **kwargs)
    assert_is_what_a_full_forward_gives(model, batch, length, mask)
    if family == "gpt2":
        return  # learned positions: transformers itself gives padded GPT-2 other positions in static caches
    for row, text in enumerate(texts):
        alone = generate(model, text)
        torch.testing.assert_close(
            torch.stack(batch.logits, 1)[row], torch.stack(alone.logits, 1)[0], rtol=1e-3, atol=5e-4
        )


@families
@pytest.mark.parametrize("sizes", [[1] * 48, [20, 1, 1, 10, 16], [5, 43], [30, 18]])
def test_any_chunks_equal_one_prefill(family, sizes):
    model, ids = model_of(family), token_ids(length=48)
    expected = logits(model, ids, use_cache=False)
    cache, parts, start = DynamicCache(config=model.config), [], 0
    for size in sizes:
        parts.append(logits(model, ids[:, start : start + size], past_key_values=cache, use_cache=True))
        start += size
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, **CLOSE)


@families
def test_chunks_into_a_static_cache(family):
    model, ids = model_of(family), token_ids(length=48)
    cache = StaticCache(config=model.config, max_cache_len=64)
    parts = [logits(model, chunk, past_key_values=cache, use_cache=True) for chunk in ids.split([29, 1, 1, 17], 1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), logits(model, ids, use_cache=False), **CLOSE)
    cache.reset()
    again = logits(model, ids[:, :29], past_key_values=cache, use_cache=True)
    torch.testing.assert_close(again, parts[0], **CLOSE)


def filled_cache(model, ids):
    cache = DynamicCache(config=model.config)
    logits(model, ids, past_key_values=cache, use_cache=True)
    return cache


def test_groups_of_keys_wait_until_they_may_be_left_behind(routing, monkeypatch):
    """A plain cache has them found for a whole window of single tokens at once, whatever is then done to it."""
    if routing == "shared":
        pytest.skip("with shared routing a token's groups are its query's, too")
    model, ids = model_of("llama"), token_ids(length=48)
    expected = logits(model, ids, use_cache=False)
    found, of_keys = [], routers.key_groups

    def counted(keys, router):
        found.append(keys.shape[2])
        return of_keys(keys, router)

    monkeypatch.setattr(routers, "key_groups", counted)

    def go_on(cache, first, end, size=1):
        found.clear()
        for start in range(first, end, size):
            part = logits(model, ids[:, start : start + size], past_key_values=cache, use_cache=True)
            torch.testing.assert_close(part, expected[:, start : start + size], **CLOSE)

    layers, together = model.config.num_hidden_layers, WINDOW + 2
    cache = filled_cache(model, ids[:, :20])
    go_on(cache, 20, 20 + together)
    assert found == [1] * layers
    go_on(cache, 20 + together, 20 + together + 1)
    assert found == [together] * layers
    go_on(cache, 21 + together, 23 + together)
    assert not found
    copied, cropped = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    go_on(cache, 23 + together, 27 + together, size=4)
    assert found == [2 + 4] * layers
    go_on(copied, 23 + together, 48)
    cropped.crop(-3)
    go_on(cropped, 20 + together, 48)
    monkeypatch.setattr(routers, "MOST_WAITING", 3)  # however wide the window is
    cache = filled_cache(model, ids[:, :20])
    go_on(cache, 20, 30)
    assert found == [1] * layers + [5] * layers
    # A smaller window leaves keys behind at once.
    cache = filled_cache(model, ids[:, :20])
    for start in range(20, 24):
        logits(model, ids[:, start : start + 1], past_key_values=cache, use_cache=True)
    anew = copy.deepcopy(cache)
    for layer in anew.layers:
        del layer.focus_memory
    for layer in focus_layers(model):
        layer.configs[layer.routing_adapter].local_window = 1
    found.clear()
    results = [logits(model, ids[:, 24:25], past_key_values=past, use_cache=True) for past in (cache, anew)]
    assert found == [4] * layers + [25] * layers
    torch.testing.assert_close(*results, **CLOSE)


FULL_ATTENTION = [family for family in FAMILIES if not family.startswith("gemma")]  # sliding layers cannot be cropped


@pytest.mark.parametrize("family", FULL_ATTENTION)
def test_cropped_cache(family):
    model, ids = model_of(family), token_ids(length=48)
    cache = filled_cache(model, ids[:, :40])
    cache.crop(-10)
    rest = logits(model, ids[:, 30:], past_key_values=cache, use_cache=True)
    torch.testing.assert_close(rest, logits(model, ids, use_cache=False)[:, 30:], **CLOSE)


@families
def test_reordered_repeated_selected_and_copied_cache(family):
    model, ids = model_of(family), token_ids(batch=3, length=48)
    whole = logits(model, ids, use_cache=False)[:, 40:]
    prompt, rest = ids[:, :40], ids[:, 40:]

    def continued(cache, rows):
        return logits(model, rest[rows], past_key_values=cache, use_cache=True)

    order = torch.tensor([2, 0, 1])
    cache = filled_cache(model, prompt)
    copied = copy.deepcopy(cache)
    cache.reorder_cache(order)
    torch.testing.assert_close(continued(cache, order), whole[order], **CLOSE)
    torch.testing.assert_close(continued(copied, torch.arange(3)), whole, **CLOSE)

    cache = filled_cache(model, prompt)
    cache.batch_repeat_interleave(2)
    rows = torch.tensor([0, 0, 1, 1, 2, 2])
    torch.testing.assert_close(continued(cache, rows), whole[rows], **CLOSE)

    cache = filled_cache(model, prompt)
    rows = torch.tensor([2, 1])
    cache.batch_select_indices(rows)
    torch.testing.assert_close(continued(cache, rows), whole[rows], **CLOSE)


@pytest.mark.parametrize("dense_below", [10, 30])
def test_dense_below_in_every_way_of_caching(dense_below):
    """Prefill below and beyond it, then a token and a chunk at a time."""
    model, ids = model_of("llama", dense_below=dense_below), token_ids(length=48)
    expected = logits(model, ids, use_cache=False)
    for first in (5, 20, 40):
        past, parts = DynamicCache(config=model.config), []
        for chunk in (ids[:, :first], ids[:, first : first + 1], ids[:, first + 1 : 45], ids[:, 45:]):
            parts.append(logits(model, chunk, past_key_values=past, use_cache=True))
        torch.testing.assert_close(torch.cat(parts, dim=1), expected, **CLOSE)


def test_keys_stay_in_their_order():
    model, ids = focus_model("llama", **_CHANGES), token_ids(length=48)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    past, base_past = DynamicCache(config=model.config), DynamicCache(config=model.config)
    logits(model, ids, attention_mask=mask, past_key_values=past, use_cache=True)
    with model.disable_adapter():
        logits(model, ids, attention_mask=mask, past_key_values=base_past, use_cache=True)
    real = mask.bool()[:, None, :, None]  # the first layer's keys do not depend on the adapter
    assert torch.equal(past.layers[0].keys * real, base_past.layers[0].keys * real)
    assert torch.equal(past.layers[0].values * real, base_past.layers[0].values * real)


def test_tokens_cached_without_the_adapter():
    """With shared routing their groups are unknown, so new tokens attend to them as the base model would; a group that
    is a function of the key alone is known of any."""
    model, ids = focus_model("llama", **_CHANGES), token_ids(length=48)
    with model.disable_adapter():
        cache = filled_cache(model.base_model.model, ids[:, :47])
        dense = logits(model, ids[:, 47:], past_key_values=copy.deepcopy(cache), use_cache=True)
    result = logits(model, ids[:, 47:], past_key_values=cache, use_cache=True)
    if _CHANGES:
        assert (result - dense).abs().max() > 1e-3
    else:
        torch.testing.assert_close(result, dense, **CLOSE)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_what_is_asked_after_a_document_can_be_read_densely(family):
    """Switched off between calls: the base model goes on from the keys and values that Focus has left."""
    whole, ids = focus_model(family, **_CHANGES).double(), token_ids(length=60)
    model = whole.base_model.model
    cache, plain = filled_cache(model, ids[:, :50]), DynamicCache(config=model.config)
    for number, layer in enumerate(cache.layers):
        plain.update(layer.keys.clone(), layer.values.clone(), number)
    routed = generate(model, ids, past_key_values=copy.deepcopy(cache))
    with whole.disable_adapter():
        result = generate(model, ids, past_key_values=cache)
    expected = generate(base_model(family).double(), ids, past_key_values=plain)
    torch.testing.assert_close(torch.stack(result.logits), torch.stack(expected.logits), **CLOSE)
    assert torch.equal(result.sequences, expected.sequences)
    assert (torch.stack(routed.logits) - torch.stack(result.logits))[0].abs().max() > 1e-3


def test_the_dial_can_be_turned_between_calls(routing):
    model, ids = focus_model("llama", **_CHANGES), token_ids(length=48)
    dense = None
    with model.disable_adapter():
        dense = logits(model, ids)
    differences = []
    dial = [{"threshold": t} for t in (-4.0, -6.0, -1e5)] if routing != "shared" else [{"top_k": k} for k in (1, 2, 4)]
    for setting in dial:
        focus_hf.set_routing(model, **setting)
        differences.append((logits(model, ids) - dense).abs().max().item())
    assert differences[0] > 1e-3 and differences[2] < 1e-4  # all groups: every pair is attended
