"""Single tokens take the short way, by numbers of groups, and it gives what a call without a cache gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import focus_hf
from focus_hf.adapter import focus_layers, hooks, interface, observe_routing, set_routing, stored
from focus_hf.adapter.last_tokens import Routed, Unrouted
from focus_hf.attention import Pattern
from focus_hf.bench.counting import LaunchCounter
from tests.adapter.test_heads import PATTERNS, heads_model
from tests.families import FAMILIES, focus_config, focus_model, token_ids

OTHER = {**PATTERNS, "1.1": {"attend": "groups", "top_k": 3, "local_window": 9}, "0.1": {"attend": "window"}}


def model_of(routing: str) -> Any:
    if routing == "shared":
        return focus_model("llama", num_groups=6, top_k=2)
    model = heads_model("llama", budgets={"0.3": PATTERNS, "0.9": OTHER})
    focus_hf.set_routing(model, pairs="0.3")
    return model


def routed(model: Any, cache: Any) -> list[Any]:
    """The cache's layers whose heads have groups."""
    return [cache.layers[router.layer_idx] for router in focus_layers(model) if router.tensors_of("default")]


def step(model: Any, cache: Any, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, past_key_values=cache, **kwargs).logits


@pytest.mark.parametrize("routing", ["per_head", "shared"])
@pytest.mark.parametrize("change", ["none", "crop", "crop and several", "reorder", "repeat", "off and on"])
def test_tokens_go_on_by_numbers_whatever_happens_to_the_cache(routing: str, change: str) -> None:
    model, said = model_of(routing), token_ids(length=60)
    cache = DynamicCache(config=model.config)
    step(model, cache, said[:, :40])
    for i in range(40, 46):
        step(model, cache, said[:, i : i + 1])
    assert all(layer.group_numbers.shape[-1] == 46 for layer in routed(model, cache))
    at = 46
    if change.startswith("crop"):
        cache.crop(-4)
        at, said = 42, torch.cat([said[:, :42], said[:, 42:].flip(1)], dim=1)
    if change == "crop and several":  # several tokens at once need memberships
        step(model, cache, said[:, 42:45])
        at = 45
    elif change == "reorder":
        cache.reorder_cache(torch.tensor([1, 0]))
        said = torch.cat([said.flip(0)[:, :46], said[:, 46:]], dim=1)
    elif change == "repeat":
        cache.batch_repeat_interleave(2)
        said = said.repeat_interleave(2, dim=0)
    elif change == "off and on":
        set_routing(model, mode="dense")
        step(model, cache, said[:, at : at + 1])
        set_routing(model, mode="hard")
        at += 1
    logits = [step(model, cache, said[:, i : i + 1]) for i in range(at, 60)]
    if change == "off and on":  # that token's groups are unknown: no numbers can say so
        assert all(layer.group_numbers is None for layer in routed(model, cache))
    else:
        assert all(layer.group_numbers.shape[-1] == 60 for layer in routed(model, cache))
        with torch.no_grad():
            whole = model(input_ids=said, use_cache=False).logits[:, at:]
        torch.testing.assert_close(torch.cat(logits, dim=1), whole, rtol=1e-3, atol=2e-4)
    for layer in routed(model, cache):  # memberships can be had at any time
        assert layer.group_memberships.shape[:2] == said.shape


@pytest.mark.parametrize("routing", ["per_head", "shared"])
def test_memberships_made_of_numbers_are_those_that_would_have_been_kept(routing: str) -> None:
    model, ids = model_of(routing), token_ids(length=60)
    kept = []
    for path in ("auto", "masked"):  # who names a path does not take the short way
        set_routing(model, path=path)
        cache = DynamicCache(config=model.config)
        for some in ids.split([40, *[1] * 20], dim=1):
            step(model, cache, some)
        layers = routed(model, cache)
        assert all((layer.group_numbers is None) == (path == "masked") for layer in layers)
        kept.append([layer.group_memberships for layer in layers])
    assert all(torch.equal(*pair) for pair in zip(*kept, strict=True))


def test_tokens_in_the_places_of_cropped_ones_are_not_taken_for_them() -> None:
    """Also if nobody looked on when they came: nothing is known of their groups, and everybody attends to them."""
    model, ids = model_of("per_head"), token_ids(length=60)
    cache = DynamicCache(config=model.config)
    for some in ids[:, :46].split([40, *[1] * 6], dim=1):
        step(model, cache, some)
    set_routing(model, mode="dense")
    step(model, cache, ids[:, 46:48])
    cache.crop(-4)
    step(model, cache, ids[:, 50:54])
    set_routing(model, mode="hard")
    step(model, cache, ids[:, 54:55])
    for layer in routed(model, cache):
        known = layer.group_memberships
        assert known.shape[1] == 49 and known[:, 44:48].all() and not known[:, :44].all(-1).any()


def test_a_budget_may_change_on_the_way() -> None:
    """Earlier tokens keep what they found under the other one, as they do without numbers."""
    model, ids, logits = model_of("per_head"), token_ids(length=60), []
    for path in ("auto", "masked"):
        set_routing(model, path=path, pairs="0.3")
        cache = DynamicCache(config=model.config)
        for some in ids[:, :50].split([40, *[1] * 10], dim=1):
            step(model, cache, some)
        set_routing(model, path=path, pairs="0.9")
        logits.append(torch.cat([step(model, cache, ids[:, i : i + 1]) for i in range(50, 60)], dim=1))
    torch.testing.assert_close(*logits, rtol=1e-3, atol=2e-4)


def test_who_looks_on_sees_every_token() -> None:
    model, ids, seen = model_of("per_head"), token_ids(length=60), []
    cache = DynamicCache(config=model.config)
    step(model, cache, ids[:, :50])
    with observe_routing(model, lambda layer, scores, memberships: seen.append(memberships.shape[1])):
        step(model, cache, ids[:, 50:51])
    assert seen and set(seen) == {1}
    assert all(layer.group_numbers is None for layer in routed(model, cache))


@pytest.mark.parametrize("routing", ["per_head", "shared"])
def test_a_long_cache_is_sorted_by_groups_from_there(routing: str, monkeypatch: Any) -> None:
    model, ids = model_of(routing), token_ids(length=60)
    cache = DynamicCache(config=model.config)
    for some in ids[:, :50].split([40, *[1] * 10], dim=1):
        step(model, cache, some)
    monkeypatch.setattr(stored, "GROUPED_TOKENS_PER_SLAB", 0)
    monkeypatch.setattr(stored, "GROUPED_TOKENS_BY_HEAD", 0)
    logits = [step(model, cache, ids[:, i : i + 1]) for i in range(50, 60)]
    assert all(layer.store is not None for layer in routed(model, cache))
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits[:, 50:]
    torch.testing.assert_close(torch.cat(logits, dim=1), whole, rtol=1e-3, atol=2e-4)


def test_routers_follow_their_tensors() -> None:
    """What is put together once is made anew when tensors move, and sees what happens to them in place."""
    model, ids = model_of("per_head"), token_ids(length=50)
    (layer,) = [layer for layer in focus_layers(model) if layer.layer_idx == 0]
    hidden = torch.randn(1, 5, layer.focus_proj["default"].shape[-1])
    step(model, DynamicCache(config=model.config), ids)

    def scores() -> torch.Tensor:
        with torch.no_grad():
            return layer.head_scores(hidden, "default").keys

    before = scores()
    with torch.no_grad():
        layer.focus_balance["default"].add_(1.0)
    torch.testing.assert_close(scores(), before + 1.0)
    layer.focus_balance["default"].data = layer.focus_balance["default"].data + 1.0
    torch.testing.assert_close(scores(), before + 2.0)
    model.to(torch.float64).to(torch.float32)
    torch.testing.assert_close(scores(), before + 2.0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("routing", ["per_head", "shared"])
def test_every_family_takes_it(family: str, routing: str, monkeypatch: Any) -> None:
    """But for soft-capped scores, which need more."""
    model, ids, short = heads_model(family) if routing == "per_head" else focus_model(family), token_ids(), []

    def attend(*args: Any) -> Any:
        short.append(found := attend_new_token(*args))
        return found

    attend_new_token = interface.attend_new_token
    monkeypatch.setattr(interface, "attend_new_token", attend)
    cache = DynamicCache(config=model.config)
    step(model, cache, ids[:, :40])
    new = [step(model, cache, ids[:, i : i + 1]) for i in range(40, 48)]
    with_groups = [layer for layer in focus_layers(model) if layer.tensors_of("default")]
    expected = 0 if family == "gemma2" else 8 * len(with_groups)
    assert sum(output is not None for output in short) == expected
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits[:, 40:]
    torch.testing.assert_close(torch.cat(new, dim=1), whole, rtol=1e-3, atol=2e-4)


def test_groups_are_found_when_a_token_leaves_the_narrowest_window_or_somebody_asks() -> None:
    model, ids = model_of("per_head"), token_ids(length=60)
    cache = DynamicCache(config=model.config)
    step(model, cache, ids[:, :40])
    for i in range(40, 60):
        step(model, cache, ids[:, i : i + 1])
        for layer in routed(model, cache):
            _, seen = layer.last_tokens.shape
            assert (
                seen == i + 1 and layer.last_tokens._found.shape[-1] >= seen - 9
            )  # a window of 8, and the token itself
    twin = copy.deepcopy(cache)  # asks for itself
    assert all(layer.group_numbers.shape[-1] == 60 and layer.last_tokens is None for layer in routed(model, twin))
    assert all(layer.last_tokens is not None for layer in routed(model, cache))
    for layer, other in zip(routed(model, cache), routed(model, twin), strict=True):
        assert torch.equal(layer.group_memberships, other.group_memberships)


def test_finding_groups_asks_the_device_for_nothing() -> None:
    counts = []
    for batch in (1, 4):
        model, ids = model_of("per_head"), token_ids(batch=batch, length=60)
        cache = DynamicCache(config=model.config)
        for some in ids[:, :45].split([40, *[1] * 5], dim=1):
            step(model, cache, some)
        layer = routed(model, cache)[0]
        layer.last_tokens.find()
        with LaunchCounter() as counter:
            layer.last_tokens.find()
        assert not counter.syncs
        counts.append(sum(counter.operations.values()))
    assert counts[0] == counts[1] <= 5, counts


def change_config(model: Any) -> None:
    for layer in focus_layers(model):
        config = layer.routing_config
        config.head_patterns = {**OTHER, "1.1": {"attend": "groups", "top_k": 2, "local_window": 2}}


def move_tensors(model: Any) -> None:
    model.to(torch.float64).to(torch.float32)
    for layer in focus_layers(model):
        for tensor in layer.tensors_of("default"):
            tensor.data = torch.randn_like(tensor)


CHANGES = {
    "mode": lambda model: set_routing(model, mode="window", window=3),
    "dense": lambda model: set_routing(model, mode="dense"),
    "budget": lambda model: set_routing(model, pairs="0.9"),
    "dense below": lambda model: set_routing(model, dense_below=55),
    "config": change_config,
    "path": lambda model: set_routing(model, path="masked"),
    "off": lambda model: model.base_model.disable_adapter_layers(),
    "another adapter": lambda model: (
        model.add_adapter("other", focus_config(routing="per_head", head_patterns=OTHER)),
        model.set_adapter("other"),
    ),
    "tensors": move_tensors,
    "training mode": lambda model: model.train(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_is_changed_between_two_tokens_holds_from_the_next_one_on(change: str, monkeypatch: Any) -> None:
    """What was prepared for single tokens is forgotten: the next ones are as by the general way."""
    model, ids, logits = model_of("per_head"), token_ids(length=60), []
    cache = DynamicCache(config=model.config)
    for some in ids[:, :50].split([40, *[1] * 10], dim=1):
        step(model, cache, some)
    assert all(layer.last_tokens is not None for layer in routed(model, cache))
    CHANGES[change](model)
    twin = copy.deepcopy(cache)
    logits.append(torch.cat([step(model, cache, ids[:, i : i + 1]) for i in range(50, 60)], dim=1))
    monkeypatch.setattr(hooks, "route_one_token", lambda *args: None)
    logits.append(torch.cat([step(model, twin, ids[:, i : i + 1]) for i in range(50, 60)], dim=1))
    torch.testing.assert_close(*logits, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("routing", ["per_head", "shared"])
def test_tokens_of_a_dense_context_are_the_base_models_and_remembered(
    family: str, routing: str, monkeypatch: Any
) -> None:
    """Nothing but their groups is asked for, and these only where they count."""
    model, ids, told = heads_model(family) if routing == "per_head" else focus_model(family), token_ids(), []
    set_routing(model, dense_below=44)
    general = hooks.route
    monkeypatch.setattr(hooks, "route", lambda *args: (told.append(args[0]), general(*args))[1])

    def said(path: str) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        set_routing(model, path=path)
        cache = DynamicCache(config=model.config)
        step(model, cache, ids[:, :36])
        told.clear()
        new = torch.cat([step(model, cache, ids[:, i : i + 1]) for i in range(36, ids.shape[1])], dim=1)
        return new[:, :8], new[:, 8:], [layer.group_memberships for layer in routed(model, cache)]

    dense, beyond, known = said("auto")
    router_with_groups = [router for router in focus_layers(model) if router.tensors_of("default")]
    if family != "gemma2":  # soft-capped scores go the general way beyond the dense stretch
        assert not any(router in told for router in router_with_groups)
    _, _, known_in_general = said("masked")  # who names a path does not take the short way
    assert all(router in told for router in router_with_groups)
    assert all(torch.equal(*pair) for pair in zip(known, known_in_general, strict=True))
    with model.disable_adapter():
        cache = DynamicCache(config=model.config)
        step(model, cache, ids[:, :36])
        assert torch.equal(dense, torch.cat([step(model, cache, ids[:, i : i + 1]) for i in range(36, 44)], dim=1))
    set_routing(model, path="auto")
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits[:, 44:]
    torch.testing.assert_close(beyond, whole, rtol=1e-3, atol=2e-4)


def test_what_is_dense_is_saved_with_the_adapter(tmp_path: Any) -> None:
    model = model_of("per_head")
    set_routing(model, dense_below=64)
    model.save_pretrained(tmp_path)
    assert focus_hf.FocusConfig.from_pretrained(tmp_path).dense_below == 64


def test_a_call_that_keeps_gradients_goes_the_general_way() -> None:
    model, ids = model_of("per_head"), token_ids(length=60)
    cache = DynamicCache(config=model.config)
    step(model, cache, ids[:, :40])
    new = model(input_ids=ids[:, 40:41], past_key_values=cache).logits
    assert all(layer.group_numbers is None for layer in routed(model, cache))
    with torch.no_grad():
        whole = model(input_ids=ids[:, :41], use_cache=False).logits[:, 40:]
    torch.testing.assert_close(new.detach(), whole, rtol=1e-3, atol=2e-4)


def test_tokens_of_a_dense_context_make_nothing_that_is_as_long_as_their_window() -> None:
    found: Any = torch.zeros(1, 2, 5, dtype=torch.int64)
    for last in (Unrouted(found, None, 10**12), Routed(found, 4, Pattern(10**12, 2))):  # type: ignore[arg-type]
        assert last.has_room and last.shape == (1, 5) and torch.equal(last.find(), found)
