"""The page of an adapter whose heads route by themselves, against eager attention with a mask for each head."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import focus_hf
from focus_hf.adapter import HeadView, focus_layers, observe_routing
from focus_hf.attention import WhoAttends, attended_pairs
from focus_hf.explore import Subject, explore, render
from tests.adapter.test_heads import heads_model
from tests.explore.pages import page_data, unpack
from tests.explore.test_data import LENGTH, SINKS, Numbers, text_of
from tests.families import base_model, logits, token_ids


def masks_of(model: Any, ids: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, HeadView]]:
    """What key/value heads attend to, bool ``(H_kv, T, T)`` for each module, and the heads with groups."""
    seen: dict[str, tuple[HeadView, torch.Tensor]] = {}
    with observe_routing(model, lambda view, _, groups: seen.update({view.name: (view, groups)})):
        logits(model, ids[None])
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
    masks = {}
    for layer in focus_layers(model):
        config, heads = layer.routing_config, []
        for head in range(config.key_value_heads):
            how = config.head_pattern(layer.layer_idx, head)
            pairs = (i - j <= how.local_window) | (j < SINKS) | torch.tensor(how.attend == "everything")
            if how.attend == "groups":
                view, groups = seen[f"{layer.name}.{head}"]
                who = WhoAttends(view.pattern, torch.arange(LENGTH)[None], groups, reads=view.reads)
                pairs = attended_pairs(who)[0, 0]
            heads.append(pairs & (j <= i))
        masks[layer.name.removeprefix("base_model.model.")] = torch.stack(heads)
    return masks, {name.removeprefix("base_model.model."): view for name, (view, _) in seen.items()}


def eager(family: str, ids: torch.Tensor, masks: dict[str, torch.Tensor]) -> tuple[Any, torch.Tensor]:
    """Weights ``(H, T, T)`` of every layer, and losses."""
    model = base_model(family)
    model.set_attn_implementation("eager")

    def masked(pairs: torch.Tensor) -> Any:
        repeat = model.config.num_attention_heads // len(pairs)

        def hook(module: Any, args: Any, kwargs: Any) -> Any:
            every = pairs.repeat_interleave(repeat, dim=0)[None]
            bias = torch.zeros(every.shape).masked_fill(~every, torch.finfo(torch.float32).min)
            return args, {**kwargs, "attention_mask": bias}

        return hook

    for name, pairs in masks.items():
        model.get_submodule(name).register_forward_pre_hook(masked(pairs), with_kwargs=True)
    with torch.no_grad():
        out = model(input_ids=ids[None], output_attentions=True, use_cache=False)
    return out.attentions, torch.nn.functional.cross_entropy(out.logits[0, :-1], ids[1:], reduction="none")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("top_k", [None, 3])
def test_each_head_has_its_row(family: str, top_k: int | None) -> None:
    model, ids = heads_model(family), token_ids(batch=1, length=LENGTH)[0]
    data = explore([Subject(model, "me", top_k)], Numbers(), text_of(ids))
    page = page_data(render(data).html)
    if top_k is not None:
        focus_hf.set_routing(model, top_k=top_k)
    masks, views = masks_of(model, ids)
    assert page["layers"] == list(views) and len(views) > 1
    weights, losses = eager(family, ids, masks)
    assert torch.from_numpy(data.sides[0].losses[1:]).allclose(losses, atol=2e-4)
    repeat = base_model(family).config.num_attention_heads // len(next(iter(masks.values())))
    for number, (name, view) in enumerate(views.items()):
        mask = masks[name.rpartition(".")[0]][view.head]
        own = weights[view.layer_idx][0, view.head * repeat : (view.head + 1) * repeat].mean(dim=0)
        shown, pattern = data.sides[0].layers[number], page["sides"][0]["patterns"][number]
        how = view.routing_config.head_pattern(view.layer_idx, view.head)
        assert pattern == {"window": how.local_window, "denseBelow": 0, "groups": 1, "reads": how.top_k}
        gap = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None]
        beyond = gap > how.local_window
        assert torch.from_numpy(shown.near).allclose((own * ~beyond).sum(-1), atol=1e-4)
        assert torch.from_numpy(shown.far_weight).allclose((own * beyond).topk(4, dim=-1).values, atol=1e-4)
        assert shown.pairs == pytest.approx(mask.sum().item() / (LENGTH * (LENGTH + 1) / 2))
        for i in range(LENGTH):
            assert set(shown.reads[i].tolist()) == set(view.reads[0, i].nonzero().flatten().tolist())
        packed = unpack(page, 0, number)  # by what is on the page itself, j is attended exactly where the mask says
        meets = (packed["reads"][:, :, None, None] == packed["groups"].T[None, None]).any((1, 2))
        local = (gap <= how.local_window).numpy() | (np.arange(LENGTH)[None] < SINKS)
        assert ((meets | local) & (gap >= 0).numpy() == mask.numpy()).all()


def test_adapters_with_other_heads_do_not_stand_side_by_side() -> None:
    one, ids = heads_model("llama"), token_ids(batch=1, length=40)[0]
    other = heads_model("llama")
    focus_layers(other)[0].routing_config.head_patterns = {"0.1": {"attend": "window"}}
    with pytest.raises(ValueError, match="different layers or heads"):
        explore([Subject(one, "one"), Subject(other, "other")], Numbers(), text_of(ids))
