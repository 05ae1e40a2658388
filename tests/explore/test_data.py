"""What is on the page against eager attention of the base model, with masks made from the definition."""

from __future__ import annotations

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from focus_hf import FocusConfig, group_report
from focus_hf.adapter import focus_layers, observe_routing
from focus_hf.attention import Pattern, WhoAttends, attended_pairs
from focus_hf.evaluate import Mode, attending, perplexity, token_losses
from focus_hf.explore import Subject, explore, render, run
from focus_hf.explore.text import passages, visible
from tests.explore.pages import page_data, unpack
from tests.families import base_model, focus_model, token_ids, unbalance

LENGTH, WINDOW, SINKS = 60, 8, 2


class Numbers:
    """A tokenizer of the test models: a text is their token ids."""

    is_fast = False

    def __call__(self, text, **kwargs):
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids, **kwargs):
        return f" {ids[0]}"

    def convert_ids_to_tokens(self, ids):
        return [str(i) for i in ids]


def text_of(ids):
    return " ".join(map(str, ids.tolist()))


def eager(family, ids, masks=None):
    """Weights of every layer, mean over heads, and losses, by transformers' eager attention, with ``masks`` (bool
    ``(T, T)``, by name of the attention module) if given."""
    model = base_model(family)
    model.set_attn_implementation("eager")

    def masked(pairs):
        def hook(module, args, kwargs):
            bias = torch.zeros(pairs.shape).masked_fill(~pairs, torch.finfo(torch.float32).min)
            return args, {**kwargs, "attention_mask": bias[None, None]}

        return hook

    for name, pairs in (masks or {}).items():
        model.get_submodule(name).register_forward_pre_hook(masked(pairs), with_kwargs=True)
    with torch.no_grad():
        out = model(input_ids=ids[None], output_attentions=True, use_cache=False)
    losses = torch.nn.functional.cross_entropy(out.logits[0, :-1], ids[1:], reduction="none")
    return [weights[0].mean(0) for weights in out.attentions], losses


def memberships_of(model, ids, top_k):
    seen = {}
    with attending(model, Mode("hard", top_k)), torch.no_grad():

        def look(layer, scores, memberships):
            probabilities = (scores[0] + layer.focus_balance["default"]).softmax(-1)
            seen[layer.name.removeprefix("base_model.model.")] = (memberships[0], probabilities)

        with observe_routing(model, look):
            model(input_ids=ids[None], use_cache=False)
    return seen


@pytest.mark.parametrize(
    ("family", "top_k", "dense_below"),
    [("llama", 1, 0), ("gpt2", 2, 0), ("gemma2", 1, 0), ("gemma3_text", 2, 0), ("llama", 3, 0), ("qwen3", 1, 20)],
)
def test_the_page_shows_what_eager_attention_does(family, top_k, dense_below):
    """Gemma-2 caps its scores and routes every other layer; ``top_k=3`` of 4 groups attends to everything."""
    model = focus_model(family, dense_below=dense_below)
    ids = token_ids(batch=1, length=LENGTH)[0]
    data = explore([Subject(model, "me", top_k)], Numbers(), text_of(ids))
    page = page_data(render(data).html)
    seen = memberships_of(model, ids, top_k)
    assert page["layers"] == list(seen) and page["targets"] == 4
    positions = torch.arange(LENGTH)
    pattern = Pattern(WINDOW, SINKS, dense_below)
    masks = {
        name: attended_pairs(WhoAttends(pattern, positions[None], members[None]))[0, 0]
        for name, (members, _) in seen.items()
    }
    order = [int(name.split(".h." if ".h." in name else ".layers.")[1].split(".")[0]) for name in seen]
    focus, focus_losses = eager(family, ids, masks)
    dense, dense_losses = eager(family, ids)
    side = data.sides[0]
    assert np.isnan(side.losses[0]) and np.isnan(data.dense_losses[0])
    assert torch.from_numpy(side.losses[1:]).allclose(focus_losses, atol=2e-4)
    assert torch.from_numpy(data.dense_losses[1:]).allclose(dense_losses, atol=2e-4)
    gap = positions[:, None] - positions[None]
    for number, (name, (members, probabilities)) in enumerate(seen.items()):
        shown, mask = unpack(page, 0, number), masks[name]
        weights, of_dense = focus[order[number]], dense[order[number]]
        possible = LENGTH * (LENGTH + 1) / 2
        assert page["sides"][0]["pairs"][number] == pytest.approx(mask.sum().item() / possible, abs=1e-4)
        for i in range(LENGTH):
            groups = members[i].nonzero().flatten().tolist()
            assert sorted(shown["groups"][i]) == groups
            assert shown["groups"][i][0] == max(groups, key=lambda group: probabilities[i, group])
        sure = np.take_along_axis(probabilities.numpy(), shown["groups"][:, :1], 1)[:, 0]
        assert np.abs(shown["confidence"] - sure).max() <= 0.5 / 255 + 1e-6
        beyond = gap > WINDOW
        sink = beyond & (positions[None] < SINKS)
        lost = of_dense * ~mask
        for mass, expected in (("near", weights * ~beyond), ("sink", weights * sink), ("lost_mass", lost)):
            assert close(shown[mass], expected.sum(-1)), mass
        for kind, of in (("far", weights * beyond), ("lost", lost)):
            strongest = of.topk(4, dim=-1).values
            assert close(shown[f"{kind}_weight"], strongest), kind
            for i in range(LENGTH):
                for distance, weight in zip(shown[f"{kind}_distance"][i], shown[f"{kind}_weight"][i], strict=True):
                    assert (weight > 0) == (distance > 0)
                    if weight > 0:
                        assert close(np.array(weight), of[i, i - int(distance)])
                        assert bool(mask[i, i - int(distance)]) == (kind == "far")
        if top_k == 3:
            assert shown["lost_mass"].max() == 0 and shown["far_weight"].max() > 0


def close(shown, expected):
    """Equal but for a byte's worth of a square root."""
    return np.abs(np.sqrt(shown) - np.sqrt(np.clip(np.asarray(expected), 0, 1))).max() <= 0.5 / 255 + 1e-4


def test_settings_of_the_model_stay():
    model = focus_model("llama")
    before = dict(ALL_ATTENTION_FUNCTIONS)
    explore([Subject(model, "one", 1), Subject(model, "two", 2)], Numbers(), text_of(token_ids(1, 40)[0]))
    assert dict(ALL_ATTENTION_FUNCTIONS) == before
    for layer in focus_layers(model):
        assert layer.mode is None and layer.observer is None and layer.routing_config.top_k == 1
        assert not layer.disable_adapters


@pytest.fixture(scope="module")
def parts(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny / "base")
    torch.manual_seed(1)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny / "base"),
        FocusConfig(num_groups=4, local_window=8, sink_tokens=2, task_type="CAUSAL_LM"),
    ).eval()
    unbalance(model)
    return model, tokenizer, (tiny / "held_out.txt").read_text(encoding="utf-8")


def test_long_texts_are_read_in_windows(parts):
    model, tokenizer, text = parts
    ticks = []
    data = explore([Subject(model, "me")], tokenizer, text, max_tokens=1100, tick=ticks.append)
    assert data.starts == [0, 512, 1024] and len(data.tokens) == 1100  # the model has 512 positions
    assert sum(ticks) == 2 * 1100 and data.left_out == len(tokenizer(text)["input_ids"]) - 1100
    windows = torch.tensor(tokenizer(text)["input_ids"][:1024]).view(2, 512)
    with attending(model, Mode("hard")):
        expected = token_losses(model, windows)
    found = torch.from_numpy(data.sides[0].losses[:1024]).view(2, 512)
    assert found[:, 0].isnan().all() and found[:, 1:].allclose(expected, atol=1e-4)
    shown = page_data(render(explore([Subject(model, "me")], tokenizer, text, max_tokens=512)).html)
    with attending(model, Mode("dense")):
        assert shown["dense"]["perplexity"] == pytest.approx(perplexity(model, windows[:1]), rel=1e-4)
    for view in data.sides[0].layers:  # nothing reaches across a window
        place = np.arange(1100)[:, None] - np.array([0] * 512 + [512] * 512 + [1024] * 76)[:, None]
        assert (view.far_distance <= place).all() and (view.lost_distance <= place).all()
    short = explore([Subject(model, "me")], tokenizer, text, max_tokens=300, window=100)
    assert short.starts == [0, 100, 200]


def test_tokens_add_up_to_the_text(parts):
    _, tokenizer, text = parts
    text = f"{text[:3000]}\n\tNaïve — “quotes”, 日本語, Ελληνικά 👩‍👩‍👧, e\u0301 שלום\n"
    found, left_out = passages(tokenizer, [text], 10_000, 100)
    assert "".join(piece for passage in found for piece in passage.pieces) == visible(text) == text
    assert left_out == 0 and [len(passage.ids) for passage in found[:-1]] == [100] * (len(found) - 1)
    pieces = [piece for passage in found for piece in passage.pieces]
    assert "" in pieces and "\ufffd" not in pieces  # characters of several tokens are with the first of them
    both, _ = passages(tokenizer, ["one two", "three"], 10_000, 100)
    assert ["".join(passage.pieces) for passage in both] == ["one two", "three"]
    assert sum(len(passage.ids) for passage in passages(tokenizer, [text, text], 150, 100)[0]) == 150
    with pytest.raises(ValueError, match="no tokens"):
        passages(tokenizer, [""], 10, 10)


def test_hidden_characters_are_shown():
    assert visible("a\u202eb\u2066c\u200f\x00\x1b\u2028\ufeff\ud800") == (
        "a⟨U+202E⟩b⟨U+2066⟩c⟨U+200F⟩⟨U+0000⟩⟨U+001B⟩⟨U+2028⟩⟨U+FEFF⟩⟨U+D800⟩"
    )
    assert visible("a\r\nb\rc\td e\u00a0") == "a\nb\nc\td e\u00a0" and visible("क्‍ष") == "क्‍ष"


def test_one_token_is_enough(parts):
    model, tokenizer, _ = parts
    data = explore([Subject(model, "me")], tokenizer, ["the", "the"])
    assert len(data.tokens) == len(data.starts) == 2 and np.isnan(data.dense_losses).all()
    assert page_data(render(data).html)["dense"]["perplexity"] is None


def test_groups_of_two_adapters_share_colours(parts, tiny):
    """The second adapter is the first with its groups in another order."""
    model, tokenizer, text = parts
    order = torch.tensor([2, 0, 3, 1])  # group ``order[i]`` of the first is group ``i`` of the second
    other = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny / "base"),
        FocusConfig(num_groups=4, local_window=8, sink_tokens=2, task_type="CAUSAL_LM"),
    ).eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        for layer in focus_layers(other):
            for kind in (layer.focus_centroids, layer.focus_balance):
                kind["default"].copy_(kind["default"][order].clone())
    data = explore([Subject(model, "one"), Subject(other, "two")], tokenizer, text, max_tokens=400)
    first, second = data.sides
    for number, (one, two) in enumerate(zip(first.layers, second.layers, strict=True)):
        colours = np.array(second.colours[number])
        assert (colours[two.groups] == one.groups).all() and sorted(colours) == [0, 1, 2, 3]
        for group in set(two.groups.flatten()):
            assert second.overlaps[number][group] == 1.0
    assert first.overlaps == [] and first.colours[0] == [0, 1, 2, 3]
    same = explore([Subject(model, "one", 1), Subject(model, "two", 2)], tokenizer, text, max_tokens=100)
    assert same.sides[1].colours == first.colours and same.sides[1].overlaps == []
    assert math.isclose(same.sides[0].pairs, same.sides[0].layers[0].pairs, rel_tol=0.5)
    assert same.sides[1].pairs > same.sides[0].pairs


def test_the_legend_is_the_adapters_report(parts):
    model, tokenizer, text = parts
    report = group_report(model, tokenizer, text[:4000])
    data = explore([Subject(model, "me", report=report)], tokenizer, text, max_tokens=64)
    for layer, notes in zip(report.layers, data.sides[0].notes, strict=True):
        for group, note in zip(layer.groups, notes, strict=True):
            assert note.label == group.label and note.share == group.share
            assert note.tokens == [item["token"] for item in group.lifted or group.top][:6]
    report.layers[0].name = "another"
    with pytest.raises(ValueError, match="report of me says nothing about model.layers.0.self_attn. Make it again"):
        explore([Subject(model, "me", report=report)], tokenizer, text, max_tokens=64)
    with pytest.raises(ValueError, match="is about 8 groups, but there are 4"):
        report.num_groups = 8
        explore([Subject(model, "me", report=report)], tokenizer, text, max_tokens=64)


def test_wrong_requests(parts, monkeypatch):
    model, tokenizer, text = parts
    side = Subject(model, "me")
    with pytest.raises(ValueError, match="one or two sides, got 3"):
        explore([side] * 3, tokenizer, text)
    with pytest.raises(ValueError, match=r"top_k must be from 1 to num_groups \(4\), got 5"):
        explore([Subject(model, "me", 5)], tokenizer, text)
    with pytest.raises(ValueError, match="route different layers"):
        explore([side, Subject(focus_model("llama"), "other")], tokenizer, text)
    with pytest.raises(ValueError, match="at least one token"):
        explore([side], tokenizer, text, window=0)
    monkeypatch.setattr(run, "attention_calls", lambda model, look: nullcontext())
    with pytest.raises(ValueError, match="calls its attention in a way of its own"):
        explore([side], tokenizer, text, max_tokens=20)
