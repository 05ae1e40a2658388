"""What looks at groups, where every head has groups of its own."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import focus_hf
from focus_hf import FocusConfig, GroupReport, group_report
from focus_hf.adapter import HeadView, focus_layers, observe_attention, observe_routing
from focus_hf.escape import escape
from focus_hf.evaluate.modes import Mode, attending
from focus_hf.evaluate.sample import take_sample
from focus_hf.interpret import run as interpret_run
from focus_hf.interpret.collect import Window
from focus_hf.interpret.distance import distant_attention
from focus_hf.interpret.figures import save_plots
from focus_hf.interpret.match import match_adapters
from focus_hf.records.sample import same_groups
from focus_hf.train import calibrate
from focus_hf.train.calibration import largest_groups
from tests.adapter.test_heads import heads_model
from tests.families import WINDOW, logits, token_ids
from tests.interpret.test_parts import GOOD


def adapted(tiny: Any, patterns: dict[str, Any], seed: int = 1) -> Any:
    """The tiny model with an adapter whose heads route by themselves."""
    torch.manual_seed(seed)
    config = FocusConfig(
        num_groups=4,
        top_k=2,
        local_window=8,
        sink_tokens=2,
        routing="per_head",
        head_patterns=patterns,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(AutoModelForCausalLM.from_pretrained(tiny / "base"), config).eval()


@pytest.fixture(scope="module")
def parts(tiny: Any) -> Any:
    return adapted(tiny, {"0.0": {"attend": "window"}}), AutoTokenizer.from_pretrained(tiny / "base")


def routers(model: Any) -> list[str]:
    return [
        f"{layer.name}.{head}"
        for layer in focus_layers(model)
        for head in layer.routing_config.heads_with_groups(layer.layer_idx)
    ]


def test_a_report_has_an_entry_for_each_head_with_groups(parts: Any, tiny: Any, tmp_path: Any) -> None:
    model, tokenizer = parts
    text = (tiny / "held_out.txt").read_text()[:3000]
    report = group_report(model, tokenizer, text, window=200)
    assert [layer.name for layer in report.layers] == routers(model) and len(report.layers) > 1
    assert not any(layer.name.endswith("layers.0.self_attn.0") for layer in report.layers)
    seen: dict[str, list[torch.Tensor]] = {}
    windows = [w for w in torch.tensor(tokenizer(text)["input_ids"]).split(200) if len(w) > 1]
    with observe_routing(model, lambda view, _, groups: seen.setdefault(view.name, []).append(groups[0])):
        for window in windows:
            logits(model, window[None])
    for layer in report.layers:
        shares = torch.cat(seen[layer.name]).float().mean(dim=0)
        assert [group.share for group in layer.groups] == pytest.approx(shares.tolist(), abs=1e-4)
        assert layer.pairs and not layer.flow
    last = report.layers[-1]
    assert last.title.endswith(f"self_attn, head {last.head}") and escape(last.title) in report.to_markdown()
    report.to_json(tmp_path / "groups.json")
    assert GroupReport.from_json(tmp_path / "groups.json") == report
    assert {path.name for path in save_plots(report, tmp_path)} == {"groups-map.png", "groups-strip.png"}


def test_reports_of_older_versions_are_read(parts: Any, tmp_path: Any) -> None:
    model, tokenizer = parts
    report = json.loads(group_report(model, tokenizer, "one two three. " * 60, window=100).to_json())
    del report["heads_left_out"]
    for layer in report["layers"]:
        del layer["head"]
    (tmp_path / "old.json").write_text(json.dumps(report | {"schema": 1}))
    assert GroupReport.from_json(tmp_path / "old.json").layers[0].title == report["layers"][0]["name"]


def test_of_many_heads_those_that_attend_furthest_are_told(parts: Any, tiny: Any, monkeypatch: Any) -> None:
    model, tokenizer = parts
    text = (tiny / "held_out.txt").read_text()[:3000]
    monkeypatch.setattr(interpret_run, "MOST_HEADS", 1)
    report = group_report(model, tokenizer, text, window=200)
    (only,) = report.layers
    assert report.heads_left_out == len(routers(model)) - 1 > 0
    assert "the 1 that attend furthest away" in report.to_markdown()
    windows = [Window(w) for w in torch.tensor(tokenizer(text)["input_ids"]).split(200) if len(w) == 200][:4]
    far = {name: found.overall for name, found in distant_attention(model, windows).items()}
    assert only.name == max(far, key=lambda name: far[name])


def test_agreement_with_a_treebank_is_told_by_head(parts: Any, tmp_path: Any) -> None:
    model, tokenizer = parts
    (tmp_path / "small.conllu").write_text(GOOD * 60)
    report = group_report(model, tokenizer, tmp_path / "small.conllu", window=100)
    assert all(0 <= layer.agreement["upos"]["groups"]["nmi"] <= 1 for layer in report.layers)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_distant_attention_is_that_of_what_a_head_reads(family: str) -> None:
    model, ids = heads_model(family), token_ids(batch=1, length=48)
    found = distant_attention(model, [Window(ids[0])])
    expected: dict[str, tuple[torch.Tensor, Any, torch.Tensor]] = {}

    def look(view: HeadView, query: Any, key: Any, scale: float, groups: Any) -> None:
        how = view.routing_config.head_pattern(view.layer_idx, view.head)
        assert key.shape[1] == 1 and how.attend == "groups"
        weights = torch.zeros(48, 48, dtype=torch.double)
        for row in query[0].double():
            scores = row @ key[0, 0].double().T * scale
            for i in range(48):
                for j in range(48):
                    near = i - j <= how.local_window or j < 2
                    if j > i or not (near or bool((view.reads[0, i] & groups[0, j]).any())):
                        scores[i, j] = -math.inf
            weights += scores.softmax(-1) / query.shape[1]
        assert (view.reads.sum(-1) == how.top_k).all() and (groups.sum(-1) == 1).all()
        far = torch.tensor([[i - j > how.local_window and j >= 2 for j in range(48)] for i in range(48)])
        expected[view.name] = weights * far, view.reads[0], groups[0]

    with observe_attention(model, look):
        logits(model, ids)
    assert expected.keys() == found.keys() and len(found) > 1
    for name, (far, reads, groups) in expected.items():
        assert found[name].overall == pytest.approx(far.sum().item() / 48, abs=1e-5)
        for pair in found[name].pairs:
            assert pair.weight == pytest.approx(far[pair.query, pair.key].item(), rel=1e-3)
            assert reads[pair.query, pair.group] and groups[pair.key, pair.group]


def test_a_head_without_groups_now_reads_nothing() -> None:
    """It has centroids for another budget."""
    model = heads_model("llama", budgets={"0.5": {}})
    views: dict[tuple[int, int], HeadView] = {}
    with observe_routing(model, lambda view, *_: views.update({(view.layer_idx, view.head): view})):
        logits(model, token_ids())
        assert not views[2, 0].reads.any() and views[2, 0].pattern.local_window == WINDOW
        assert views[1, 0].pattern.dense_below > 10**6
        focus_hf.set_routing(model, pairs=0.5)
        logits(model, token_ids())
    assert (views[2, 0].reads.sum(-1) == 1).all()


def test_samples_and_balance_are_told_by_head() -> None:
    model, ids = heads_model("llama"), token_ids(batch=1)
    sample = take_sample(model, ids[0])
    assert list(sample.groups) == ["model.layers.0.self_attn.1", "model.layers.1.self_attn.1"]
    assert same_groups(sample, take_sample(model, ids[0])) == 1
    for layer in focus_layers(model)[:1]:
        layer.focus_centroids["default"].data.neg_()
    assert same_groups(sample, take_sample(model, ids[0])) < 0.9
    seen: dict[str, torch.Tensor] = {}
    with observe_routing(model, lambda view, _, groups: seen.update({view.name: groups[0].float().mean(0)})):
        logits(model, ids)
    assert largest_groups(model, [ids]) == {name: pytest.approx(s.max().item()) for name, s in seen.items()}


def test_groups_of_heads_are_not_balanced_after_fitting() -> None:
    with pytest.raises(ValueError, match="balanced when the adapter is fitted"):
        calibrate(heads_model("llama"), [token_ids()])


def test_two_adapters_are_compared_on_the_heads_that_both_have(parts: Any, tiny: Any) -> None:
    model, tokenizer = parts
    other = adapted(tiny, {"1.0": {"attend": "everything"}})
    text = [(tiny / "held_out.txt").read_text()[:1500]]
    both = [name.removeprefix("base_model.model.") for name in routers(model) if name in routers(other)]
    matched = match_adapters(model, other, tokenizer, text, window=100)
    assert [layer.name for layer in matched] == both and 0 < len(both) < len(routers(model))
    assert all(m.overlap == 1 for layer in match_adapters(model, model, tokenizer, text, 100) for m in layer.matches)


def test_a_mode_leaves_the_heads_as_they_were() -> None:
    model = heads_model("llama")
    config = focus_layers(model)[0].routing_config
    before = dict(config.head_patterns)
    with attending(model, Mode("hard", config.top_k)):
        assert config.head_pattern(3, 0).top_k == 2  # the adapter's own: heads keep theirs
    with attending(model, Mode("hard", 3)):
        assert config.head_pattern(3, 0).top_k == config.head_pattern(0, 1).top_k == 3
    assert config.head_patterns == before
