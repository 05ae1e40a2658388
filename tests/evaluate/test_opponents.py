"""Opponents against naive versions of their papers' rules, budgets, causality, and models that attend by them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from focus_hf.evaluate.opponents import OPPONENTS, SINKS, attend_by, less_scoring, make_selector, selector_named
from focus_hf.evaluate.opponents.attend import routable_layers
from focus_hf.evaluate.opponents.clusters import Clusters, k_means
from focus_hf.evaluate.opponents.pages import MeanBlocks, Quest
from focus_hf.evaluate.opponents.plain import Oracle, Random, Window
from focus_hf.evaluate.opponents.selector import WINDOW, Call, blocks, keys_at, share_of
from focus_hf.evaluate.opponents.slash import Slash
from focus_hf.evaluate.opponents.streaming import Streaming
from tests.families import FAMILIES, base_model, logits, token_ids

LENGTH, HEADS, KV_HEADS, SIZE = 200, 4, 2, 8
LOSSES = {0: torch.tensor([3.0, 1.0]), 1: torch.tensor([2.0, 5.0])}
TOGETHER = {
    one.name: one
    for one in (each.choosing_together() for each in (Quest(), Clusters(), Clusters(estimate=True), Oracle()))
}
BY_QUERY = {
    **TOGETHER,
    "window": Window(),
    "random": Random(),
    "quest": Quest(),
    "blocks": MeanBlocks(),
    "clusters": Clusters(),
    "clusters-estimate": Clusters(estimate=True),
    "oracle": Oracle(),
}
ALL = {**BY_QUERY, "slash": Slash(), "streaming": Streaming(LOSSES)}


def make_call(keys=80, length=LENGTH, new=None, seed=0, heads=HEADS, kv_heads=KV_HEADS):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, heads, length, SIZE, generator=generator)
    key, value = torch.randn(2, 2, kv_heads, length, SIZE, generator=generator)
    return Call(query[:, :, -(new or length) :], key, value, SIZE**-0.5, keys)


def all_pairs(selector, call):
    """bool (B, H, Q, S), of all blocks."""
    read = selector.reader(call)
    pairs = torch.zeros(*call.query.shape[:3], call.length, dtype=torch.bool)
    for first, end in blocks(call.start, call.length):
        pairs[:, :, first - call.start : end - call.start, :end] = read(first, end).pairs
    return pairs


def naive_units(call, units_at, score):
    """What a method of units reads, query by query: units in the order of their scores until the keys are spent."""
    pairs = torch.zeros(*call.query.shape[:3], call.length, dtype=torch.bool)
    each = call.query.shape[1] // call.key.shape[1]
    for b, h, i in torch.cartesian_prod(*map(torch.arange, (*call.query.shape[:2], call.length))).tolist():
        always = {j for j in range(i + 1) if j < SINKS or i - j < WINDOW}
        units = units_at(b, h // each, i)
        ranked = sorted(units, key=lambda unit: score(call.query[b, h, i], b, h // each, unit, i), reverse=True)
        chosen = list(always)
        for unit in ranked:
            chosen += sorted((j for j in unit if j <= i and j not in always), reverse=True)
        pairs[b, h, i, chosen[: call.keys]] = True
    return pairs


def chunks(size):
    return lambda b, g, i: [list(range(start, start + size)) for start in range(0, i + 1, size)]


def test_quest_reads_the_pages_whose_bound_is_largest():
    call = make_call(keys=90, length=150)

    def bound(query, b, g, page, i):
        if i in page:
            return math.inf
        keys = call.key[b, g, page]
        return sum(max(float(q * keys[:, d].min()), float(q * keys[:, d].max())) for d, q in enumerate(query))

    assert torch.equal(all_pairs(Quest(), call), naive_units(call, chunks(16), bound))


def test_query_heads_that_choose_together_add_up_their_softmaxes():
    call = make_call(keys=90, length=150)

    def bound(query, keys):
        return float(torch.maximum(query * keys.amin(dim=0), query * keys.amax(dim=0)).sum())

    def shared(query, b, g, page, i):
        if i in page:
            return math.inf
        pages = [list(range(start, start + 16)) for start in range(0, i - i % 16, 16)]
        total = 0.0
        for own in call.query[b, 2 * g : 2 * g + 2, i]:
            weights = [math.exp(call.scale * bound(own, call.key[b, g, each])) for each in pages]
            total += weights[page[0] // 16] / sum(weights)
        return total

    expected = naive_units(call, chunks(16), shared)
    assert torch.equal(all_pairs(TOGETHER["quest-gqa"], call), expected)


@pytest.mark.parametrize("name", TOGETHER)
def test_query_heads_that_choose_together_read_alike_and_one_alone_as_it_always_does(name):
    own = BY_QUERY[name.removesuffix("-gqa")]
    pairs = all_pairs(TOGETHER[name], make_call())
    assert torch.equal(pairs[:, ::2], pairs[:, 1::2]) and not torch.equal(pairs, all_pairs(own, make_call()))
    alone = make_call(heads=2, kv_heads=2)
    assert torch.equal(all_pairs(TOGETHER[name], alone), all_pairs(own, alone))


def test_blocks_are_read_by_the_product_with_their_mean_key():
    call = make_call(keys=100, length=220)

    def gate(query, b, g, block, i):
        return math.inf if i in block else float(query @ call.key[b, g, block].mean(dim=0))

    assert torch.equal(all_pairs(MeanBlocks(), call), naive_units(call, chunks(64), gate))


def test_the_oracle_reads_the_keys_of_most_weight():
    call = make_call(keys=80, length=110)
    score = lambda query, b, g, unit, i: float(query @ call.key[b, g, unit[0]])  # noqa: E731
    assert torch.equal(all_pairs(Oracle(), call), naive_units(call, chunks(1), score))


def naive_k_means(keys, count, rounds):
    """Spherical k-means, cluster by cluster."""
    unit = keys / keys.norm(dim=-1, keepdim=True)
    centres = [unit[start * len(keys) // count] for start in range(count)]
    for _ in range(rounds):
        nearest = [max(range(count), key=lambda c: float(key @ centres[c])) for key in unit]
        for c in range(count):
            members = unit[[i for i, own in enumerate(nearest) if own == c]]
            if len(members):
                centres[c] = members.sum(dim=0) / members.sum(dim=0).norm()
    return [max(range(count), key=lambda c: float(key @ centres[c])) for key in unit]


def test_clusters_are_k_means_of_the_keys_before_the_block():
    call = make_call(keys=80, length=150)
    found = {}

    def clusters(b, g, i):
        known = i // 64 * 64
        if (b, g, known) not in found:
            own = naive_k_means(call.key[b, g, :known], known // 16, Clusters.rounds)
            found[b, g, known] = [[j for j, c in enumerate(own) if c == cluster] for cluster in range(known // 16)]
        return [*found[b, g, known], list(range(known, i + 1))]

    def product(query, b, g, cluster, i):
        if not cluster:
            return -math.inf
        return math.inf if i in cluster else float(query @ call.key[b, g, cluster].mean(dim=0))

    expected = naive_units(call, clusters, product)
    assert torch.equal(all_pairs(Clusters(), call), expected)
    assert torch.equal(all_pairs(Clusters(estimate=True), call), expected)


def test_an_estimate_stands_for_every_key_that_is_not_read():
    call = make_call(keys=80)
    for first, end in blocks(0, LENGTH)[1:]:
        choice = Clusters(estimate=True).reader(call)(first, end)
        unread = torch.arange(first, end)[:, None] + 1 - choice.pairs.sum(dim=-1, keepdim=True)
        assert torch.equal(choice.estimate.log_sizes.exp().sum(dim=-1, keepdim=True).round().long(), unread)
    own = k_means(call.key[:, :, :128], 8, Clusters.rounds)
    last = Clusters(estimate=True).reader(call)(128, 192).estimate
    for cluster in range(8):
        members = own[0, 1] == cluster
        torch.testing.assert_close(last.key[0, 1, cluster], call.key[0, 1, :128][members].mean(dim=0))
        torch.testing.assert_close(last.value[0, 1, cluster], call.value[0, 1, :128][members].mean(dim=0))


def test_lines_are_those_on_which_most_of_the_last_queries_attention_falls():
    call = make_call(keys=90)
    selector = Slash()
    keys, distances = selector.lines(call)
    weights = torch.zeros(64, LENGTH)
    by_key, by_distance = torch.zeros(LENGTH), torch.zeros(LENGTH)
    for row, i in enumerate(range(LENGTH - 64, LENGTH)):
        weights[row, : i + 1] = (call.key[0, 0, : i + 1] @ call.query[0, 1, i] * call.scale).softmax(dim=-1)
        by_key += weights[row]
        for j in range(i + 1):
            by_distance[i - j] += weights[row, j]
    mine = keys[0, 1], distances[0, 1]
    for kind, worth, always in zip(mine, (by_key, by_distance), (SINKS, WINDOW), strict=True):
        assert kind[:always].all()
        extra, rest = worth[always:][kind[always:]], worth[always:][~kind[always:]]
        assert not len(extra) or extra.min() >= rest.max() - 1e-5 or selector_is_a_window(distances[0, 1])
    expected = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    for i in range(LENGTH):
        for j in range(i + 1):
            expected[i, j] = mine[0][j] or mine[1][i - j]
    assert torch.equal(all_pairs(selector, call)[0, 1], expected)


def selector_is_a_window(distances):
    return bool(distances[: int(distances.sum())].all())


def test_lines_look_at_the_last_queries_and_new_tokens_attend_to_everything():
    call = make_call(keys=90)
    other = torch.cat([call.query[:, :, :-1], -call.query[:, :, -1:]], dim=2)
    changed = Call(other, call.key, call.value, call.scale, call.keys)
    assert not torch.equal(all_pairs(Slash(), call), all_pairs(Slash(), changed))
    assert all_pairs(Slash(), make_call(keys=90, new=3)).sum() == 2 * HEADS * (198 + 199 + 200)


def test_streaming_heads_are_those_that_lose_least():
    call = make_call(keys=120)
    selector = Streaming(LOSSES)
    assert selector.order == [(1, 1), (0, 0), (1, 0), (0, 1)]
    keys = selector.keys_of_heads(120, LENGTH)
    assert keys[1, 1] == LENGTH and keys[0, 1] == max(keys_at(share_of(120, LENGTH) / 2, LENGTH), SINKS + WINDOW)
    mean = sum(share_of(each, LENGTH) for each in keys.values()) / 4
    assert mean == pytest.approx(share_of(120, LENGTH), abs=1 / LENGTH)
    pairs = all_pairs(selector, call)  # of layer 0
    for head in range(HEADS):
        assert torch.equal(pairs[:, head], all_pairs(Window(), make_call(keys=keys[0, head // 2]))[:, head])
    with pytest.raises(ValueError, match="layer 0 lose to a window was not measured"):
        Streaming().reader(call)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("keys", [3, 40, 80, 150])
def test_no_query_reads_later_keys_and_each_reads_itself_and_what_it_may(name, keys):
    call = make_call(keys=keys)
    pairs = all_pairs(ALL[name], call)
    assert not pairs.triu(1).any() and pairs.diagonal(dim1=-2, dim2=-1).all()
    each = pairs.sum(dim=-1)
    if name in BY_QUERY:
        assert torch.equal(each, torch.arange(1, LENGTH + 1).clamp(max=keys).expand_as(each))
        if keys >= SINKS + WINDOW:
            i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
            always = (j <= i) & ((i - j < WINDOW) | (j < SINKS))
            assert (pairs | ~always).all()
    share = (pairs.float().mean(dim=(0, 1)).sum() / (LENGTH * (LENGTH + 1) / 2)).item()
    if name != "streaming":  # which spreads its budget over the heads of a model
        assert share <= share_of(keys, LENGTH) + 1e-6 and share > share_of(keys, LENGTH) - 0.02


@pytest.mark.parametrize("name", [name for name in ALL if name != "slash"])
def test_what_comes_later_changes_no_choice(name):
    call = make_call(keys=80)
    key, value, query = call.key.clone(), call.value.clone(), call.query.clone()
    for tensor in (key, value, query):
        tensor[:, :, 150:] = 7 * tensor[:, :, 150:].flip(2) + 1
    changed = Call(query, key, value, call.scale, call.keys)
    assert torch.equal(all_pairs(ALL[name], call)[:, :, :150], all_pairs(ALL[name], changed)[:, :, :150])


@pytest.mark.parametrize("name", BY_QUERY)
def test_new_tokens_read_what_they_read_in_a_whole_sequence(name):
    whole, part = all_pairs(BY_QUERY[name], make_call()), all_pairs(BY_QUERY[name], make_call(new=37))
    assert torch.equal(whole[:, :, -37:], part)


@pytest.mark.parametrize("name", [name for name in BY_QUERY if name not in TOGETHER])
def test_query_heads_of_one_key_head_choose_by_themselves(name):
    """As if each had the keys for itself."""
    call = make_call(keys=80)
    apart = Call(call.query, *(x.repeat_interleave(2, dim=1) for x in (call.key, call.value)), call.scale, 80)
    pairs = all_pairs(BY_QUERY[name], call)
    if name == "random":  # groups are drawn for each key head
        assert not torch.equal(pairs[:, 0], pairs[:, 1]) and not torch.equal(pairs[:, 0], pairs[:, 2])
    else:
        assert torch.equal(pairs, all_pairs(BY_QUERY[name], apart))


@given(
    name=st.sampled_from(sorted(BY_QUERY)),
    keys=st.integers(1, 150),
    length=st.integers(1, 140),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    seed=st.integers(0, 99),
)
def test_any_call_is_causal_and_meets_its_budget(name, keys, length, heads, seed):
    call = make_call(keys, length, None, seed, *heads)
    pairs = all_pairs(BY_QUERY[name], call)
    assert not pairs.triu(1).any() and pairs.diagonal(dim1=-2, dim2=-1).all()
    assert torch.equal(pairs.sum(dim=-1), torch.arange(1, length + 1).clamp(max=keys).expand(2, heads[0], -1))


@given(share=st.floats(0.001, 1.0), length=st.integers(1, 9000))
def test_keys_for_a_share_are_the_nearest(share, length):
    keys = keys_at(share, length)
    near = [n for n in (keys - 1, keys, keys + 1) if 1 <= n <= length]
    assert min(near, key=lambda n: abs(share_of(n, length) - share)) == keys
    pairs = sum(min(i + 1, keys) for i in range(length)) / (length * (length + 1) / 2)
    assert pairs == pytest.approx(share_of(keys, length), abs=1e-9) and keys_at(share_of(keys, length), length) == keys


def explicit(model, pairs_of_layers, ids):
    """The base model with eager attention under explicit masks, one for each layer: ``(B, H, T, T)``."""
    layers = iter(pairs_of_layers)

    def masked(module, args, kwargs):
        keep = next(layers)
        kwargs["attention_mask"] = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
        return args, kwargs

    handles = [layer.register_forward_pre_hook(masked, with_kwargs=True) for layer in routable_layers(model)]
    try:
        return logits(model, ids)
    finally:
        for handle in handles:
            handle.remove()


class Spy:
    """A selector that keeps what another one chose."""

    def __init__(self, selector):
        self.selector, self.pairs, self.name = selector, [], selector.name

    def reader(self, call):
        self.pairs.append(all_pairs(self.selector, call))
        return self.selector.reader(call)

    def cost(self, length):
        return self.selector.cost(length)


@pytest.mark.parametrize("name", OPPONENTS)
def test_a_model_attends_under_the_mask_that_is_chosen(name):
    model, ids = base_model("llama"), token_ids(batch=2, length=100)
    before = logits(model, ids)
    spy = Spy(make_selector(name, model, ids))
    with attend_by(model, spy, keys=70) as counted:
        found = logits(model, ids)
    assert torch.equal(logits(model, ids), before) and not torch.equal(found, before)
    share = torch.stack(spy.pairs).float().mean(dim=(0, 1, 2)).sum().item() / 5050
    union = torch.stack(spy.pairs).unflatten(2, (model.config.num_key_value_heads, -1)).any(dim=3)
    loaded = union.float().mean(dim=(0, 1, 2)).sum().item() / 5050
    assert counted.loaded_share == pytest.approx(loaded, abs=1e-6) and loaded >= share - 1e-6
    alike = ("window", "blocks", "streaming", *TOGETHER)  # of blocks there is one choice
    assert (loaded > share + 1e-6) == (name not in alike)
    assert counted.share == pytest.approx(share, abs=1e-6) and share == pytest.approx(share_of(70, 100), abs=0.03)
    if name.startswith("clusters-estimate"):
        with attend_by(model, BY_QUERY[name.replace("-estimate", "")], keys=70):
            plain = logits(model, ids)
        assert (found - before).norm() < (plain - before).norm()
    else:
        model.set_attn_implementation("eager")
        torch.testing.assert_close(found, explicit(model, spy.pairs, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_dense_where_all_is_read(family):
    model, ids = base_model(family), token_ids(batch=1, length=80)
    expected = logits(model, ids)
    for name in ("quest", "slash", "clusters-estimate"):
        with attend_by(model, selector_named(name), share=1.0) as counted:
            torch.testing.assert_close(logits(model, ids), expected, rtol=1e-4, atol=1e-4)
        assert counted.share == 1.0
    with attend_by(model, Window(), share=0.3):
        assert not torch.allclose(logits(model, ids), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", BY_QUERY)
def test_with_a_cache_as_without(name):
    model, ids = base_model("llama"), token_ids(batch=2, length=90)
    with attend_by(model, BY_QUERY[name], keys=70), torch.no_grad():
        whole = logits(model, ids)
        start = model(input_ids=ids[:, :75], use_cache=True)
        rest = model(input_ids=ids[:, 75:], past_key_values=start.past_key_values).logits
    torch.testing.assert_close(rest, whole[:, 75:], rtol=1e-4, atol=1e-4)


def test_only_the_layers_that_are_named_choose():
    model, ids = base_model("llama"), token_ids(batch=1, length=80)
    with attend_by(model, Window(), keys=5, layers=routable_layers(model)[:1]) as counted:
        one = logits(model, ids)
    assert counted.possible == 4 * 80 * 81 // 2
    with attend_by(model, Window(), keys=5):
        assert not torch.equal(one, logits(model, ids))


def test_scoring_is_counted_inside_the_share_where_that_is_asked_for():
    assert Quest().cost(2048).products == 1 / 16 and MeanBlocks().cost(2048).bytes == 0.5 / 64
    assert Slash().cost(2048).products == pytest.approx(64 * 2048 * 0.5 / (2048 * 2049 / 2))
    assert less_scoring(0.24, Quest(), 2048) == pytest.approx(0.24 - 1 / 16)
    model, ids = base_model("llama"), token_ids(batch=1, length=200)
    with attend_by(model, Quest(), share=0.5, count_scoring=True) as counted:
        logits(model, ids)
    assert counted.share == pytest.approx(0.5 - 1 / 16, abs=0.01)


def test_mistakes_name_the_value_and_what_was_expected():
    model, ids = base_model("llama"), token_ids(batch=1, length=80)
    for wrong, message in (
        ({"share": 0.2, "keys": 3}, "either share or keys, got share=0.2 and keys=3"),
        ({}, "either share or keys, got share=None"),
        ({"share": 0.0}, "above 0 and at most 1, such as 0.15; got 0.0"),
        ({"share": 1.5}, "got 1.5"),
        ({"keys": 0}, "keys must be at least 1"),
        ({"keys": 9, "count_scoring": True}, "count_scoring is about a share of pairs"),
        ({"share": 0.1, "layers": []}, "no attention layer"),
    ):
        with pytest.raises(ValueError, match=message), attend_by(model, Window(), **wrong):
            pass
    with (
        pytest.raises(ValueError, match="quest costs 6.2 % of the pairs to choose, and the budget is 5.0 %"),
        attend_by(model, Quest(), share=0.05, count_scoring=True),
    ):
        logits(model, ids)
    with pytest.raises(ValueError, match="Opponents are window, .* got 'fastest'"):
        make_selector("fastest", model, ids)
    with pytest.raises(ValueError, match="Streaming heads are measured on the text"):
        make_selector("streaming", model, None)
