"""What is on the page against eager attention of the base model, with masks made from the definition."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from focus_hf import FocusConfig, set_routing
from focus_hf.adapter import focus_layers, observe_attention, observe_routing
from focus_hf.attention import attended_pairs
from focus_hf.evaluate import Mode, attending, perplexity, token_losses
from focus_hf.explore import explore, render
from focus_hf.explore.text import passages, visible
from tests.explore.pages import page_data, unpack
from tests.families import ROUTINGS, base_model, focus_model, logits, token_ids, unbalance

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


def eager(family: str, ids: torch.Tensor, masks: dict[str, torch.Tensor] | None = None) -> tuple[Any, torch.Tensor]:
    """Weights ``(H, T, T)`` of every layer, and losses, by eager attention, with ``masks`` (bool ``(H_kv, T, T)``, by
    name of the attention module) if given."""
    model = base_model(family)
    model.set_attn_implementation("eager")

    def masked(pairs):
        def hook(module, args, kwargs):
            bias = torch.zeros(pairs.shape).masked_fill(~pairs, torch.finfo(torch.float32).min)
            bias = bias.repeat_interleave(model.config.num_attention_heads // len(pairs), dim=0)
            return args, {**kwargs, "attention_mask": bias[None]}

        return hook

    for name, pairs in (masks or {}).items():
        model.get_submodule(name).register_forward_pre_hook(masked(pairs), with_kwargs=True)
    with torch.no_grad():
        out = model(input_ids=ids[None], output_attentions=True, use_cache=False)
    losses = torch.nn.functional.cross_entropy(out.logits[0, :-1], ids[1:], reduction="none")
    return [weights[0] for weights in out.attentions], losses


def routing_of(model: Any, ids: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What heads attend to, bool ``(H_kv, T, T)`` for each module, and tokens' memberships for each router."""
    masks, members = {}, {}

    def look(seen):
        pairs = attended_pairs(seen.who)[0]
        masks[plain(seen.layer.name)] = pairs.expand(seen.key.shape[1], -1, -1)

    def note(router, _, found):
        members[plain(router.name)] = found[0]

    with observe_attention(model, look), observe_routing(model, note):
        logits(model, ids[None])
    return masks, members


def plain(name: str) -> str:
    return name.removeprefix("base_model.model.")


@pytest.mark.parametrize(
    ("family", "routing", "changes"),
    [
        ("llama", "shared", {}),
        ("gpt2", "shared", {"top_k": 2}),
        ("gemma2", "shared", {}),
        ("qwen3", "shared", {"dense_below": 20}),
        ("llama", "cells", {}),
        ("gpt2", "cells", {}),
        ("gemma2", "cells", {}),
    ],
)
def test_the_page_shows_what_eager_attention_does(family, routing, changes):
    """Gemma-2 caps its scores and routes every other layer."""
    model = focus_model(family, **ROUTINGS[routing], **changes)
    ids = token_ids(batch=1, length=LENGTH)[0]
    data = explore(model, Numbers(), text_of(ids))
    page = page_data(render(data).html)
    masks, members = routing_of(model, ids)
    focus, losses = eager(family, ids, masks)
    dense, dense_losses = eager(family, ids)
    assert np.isnan(data.losses[0]) and torch.from_numpy(data.losses[1:]).allclose(losses, atol=2e-4)
    assert torch.from_numpy(data.dense_losses[1:]).allclose(dense_losses, atol=2e-4)
    assert [head.key for head in data.heads] == list(members) and page["targets"] == 8
    assert [head["name"] for head in page["heads"]] == [head.name for head in data.heads]
    gap = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None]
    far = (gap > WINDOW) & (torch.arange(LENGTH)[None] >= SINKS)
    starts = [WINDOW << band for band in range(data.pattern.num_bands)]
    assert data.pattern.num_bands == 3
    for number, head in enumerate(data.heads):
        mask, shown = masks[head.name], unpack(page, number)
        if head.head is None:
            weights, base = (of[head.layer].mean(0) for of in (focus, dense))
            mask = mask[0]
        else:
            each = len(focus[0]) // len(mask)
            own = slice(head.head * each, (head.head + 1) * each)
            weights, base = (of[head.layer][own].mean(0) for of in (focus, dense))
            mask = mask[head.head]
        assert head.pairs == pytest.approx(mask.sum().item() / (LENGTH * (LENGTH + 1) / 2), abs=1e-6)
        for i in range(LENGTH):  # one of its groups; with cells the only one
            assert members[head.key][i, shown["groups"][i]]
        assert close(shown["far"], (weights * far).sum(-1))
        assert head.reach == pytest.approx(
            float((weights * gap)[:, SINKS:].sum() / weights[:, SINKS:].sum()), rel=1e-3
        )
        band = sum((gap > start).long() for start in starts[1:])
        for b in range(3):
            there = far & (band == b)
            assert (head.places[:, b] == (there & (gap >= 0)).sum(0).numpy()).all()
            assert head.received[:, b] == pytest.approx((weights * there).sum(0).numpy(), abs=1e-3)
        first = head.layer == data.heads[0].layer  # later layers do not see what they see in the base model
        if first:
            assert close(shown["lost"], (base * ~mask).sum(-1))
        for i in range(LENGTH):
            found = shown["distance"][i] > 0
            keys = i - shown["distance"][i][found].astype(int)
            assert far[i, keys].all() and len(set(keys)) == len(keys)
            # what is less than LEAST reads as 0
            assert (
                np.abs(np.sqrt(shown["weight"][i][found]) - np.sqrt(weights[i, keys].numpy())).max(initial=0) < 0.073
            )
            large = weights[i, keys].numpy() >= 0.005
            assert close(shown["weight"][i][found][large], weights[i, keys][large])
            assert (mask[i, keys].numpy() | (shown["weight"][i][found] == 0)).all()
            if first:
                strongest = (torch.maximum(weights[i], base[i]) * far[i]).topk(8)
                wanted = {int(j) for j, w in zip(strongest.indices, strongest.values, strict=True) if w >= 0.0051}
                assert wanted <= set(keys.tolist())
                large = base[i, keys].numpy() >= 0.005
                assert close(shown["dense"][i][found][large], base[i, keys][large])


def close(shown, expected):
    """Equal but for a byte's worth of a square root."""
    difference = np.abs(np.sqrt(shown) - np.sqrt(np.clip(np.asarray(expected), 0, 1)))
    return difference.max(initial=0) <= 0.5 / 255 + 1e-3


def test_settings_of_the_model_stay():
    model = focus_model("llama", **ROUTINGS["cells"])
    set_routing(model, threshold=-4.5)
    data = explore(model, Numbers(), text_of(token_ids(1, 40)[0]))
    assert data.setting == "threshold=-4.5" and data.by_cells
    for layer in focus_layers(model):
        assert layer.mode is None and layer.observer is None and not layer.attention_observers
        assert layer.routing_config.threshold == -4.5 and not layer.disable_adapters
    set_routing(model, pairs=1.0)
    data = explore(model, Numbers(), text_of(token_ids(1, 40)[0]))
    assert data.setting == "pairs=1" and data.pairs == 1 and all(head.lost.max() == 0 for head in data.heads)


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
    data = explore(model, tokenizer, text, max_tokens=1100, tick=ticks.append)
    assert data.starts == [0, 512, 1024] and len(data.tokens) == 1100  # the model has 512 positions
    assert sum(ticks) == 2 * 1100 and data.left_out == len(tokenizer(text)["input_ids"]) - 1100
    windows = torch.tensor(tokenizer(text)["input_ids"][:1024]).view(2, 512)
    with attending(model, Mode("hard")):
        expected = token_losses(model, windows)
    found = torch.from_numpy(data.losses[:1024]).view(2, 512)
    assert found[:, 0].isnan().all() and found[:, 1:].allclose(expected, atol=1e-4)
    shown = page_data(render(explore(model, tokenizer, text, max_tokens=512)).html)
    with attending(model, Mode("dense")):
        assert shown["perplexity"]["dense"] == pytest.approx(perplexity(model, windows[:1]), rel=1e-4)
    place = np.arange(1100)[:, None] - np.array([0] * 512 + [512] * 512 + [1024] * 76)[:, None]
    for head in data.heads:  # nothing reaches across a window
        assert (head.distance <= place).all() and head.distance.max() > 8
    short = explore(model, tokenizer, text, max_tokens=300, window=100)
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
    data = explore(model, tokenizer, ["the", "the"])
    assert len(data.tokens) == len(data.starts) == 2 and np.isnan(data.dense_losses).all()
    shown = page_data(render(data).html)
    assert shown["perplexity"]["dense"] is None and "stays near: 100.0 %" in shown["heads"][0]["words"]


def test_wrong_requests(parts):
    model, tokenizer, text = parts
    with pytest.raises(ValueError, match="at least one token"):
        explore(model, tokenizer, text, window=0)
    with pytest.raises(ValueError, match=r"up to 255 groups; this adapter has 300"):
        explore(focus_model("llama", num_groups=300), Numbers(), "1 2 3")
    assert math.isnan(explore(model, tokenizer, "a", max_tokens=1).losses[0])
