"""What looks at groups, where every head has groups of its own and reads cells."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from focus_hf import FocusConfig, GroupReport, group_report
from focus_hf.adapter import Seen, focus_layers, observe_attention, observe_routing
from focus_hf.escape import escape
from focus_hf.evaluate.leave import take_sample
from focus_hf.interpret import run as interpret_run
from focus_hf.interpret.figures import save_plots
from focus_hf.interpret.match import match_adapters
from focus_hf.interpret.reading import loss_without, reading_nothing, what_is_read
from focus_hf.interpret.windows import Window
from focus_hf.records.group_facts import GroupFacts, LayerFacts
from focus_hf.records.sample import same_groups
from focus_hf.train import calibrate
from focus_hf.train.calibration import largest_groups
from tests.families import FAMILIES, focus_model, logits, token_ids
from tests.interpret.test_parts import GOOD

LENGTH, WINDOW, SINKS, BANDS = 60, 8, 2, 3


def cells(family: str, threshold: float = -4.0, **changes: Any) -> Any:
    """A small model whose heads read some cells and not others."""
    return focus_model(family, routing="cells", num_bands=BANDS, threshold=threshold, **changes)


def adapted(tiny: Any, seed: int = 1) -> Any:
    """The tiny model with an adapter whose heads route by themselves."""
    torch.manual_seed(seed)
    config = FocusConfig(
        num_groups=4,
        local_window=8,
        sink_tokens=2,
        routing="cells",
        num_bands=4,
        threshold=-5.0,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(AutoModelForCausalLM.from_pretrained(tiny / "base"), config).eval()


@pytest.fixture(scope="module")
def parts(tiny: Any) -> Any:
    return adapted(tiny), AutoTokenizer.from_pretrained(tiny / "base")


def routers(model: Any) -> list[str]:
    return [f"{layer.name}.{head}" for layer in focus_layers(model) for head in range(2)]


def test_a_report_has_an_entry_for_each_head(parts: Any, tiny: Any, tmp_path: Any) -> None:
    model, tokenizer = parts
    text = (tiny / "held_out.txt").read_text()[:3000]
    report = group_report(model, tokenizer, text, window=200)
    assert [layer.name for layer in report.layers] == routers(model)
    assert report.bands == [8, 16, 32, 64] and report.setting == "threshold=-5"
    assert report.routed_layers == report.attention_layers == 2
    seen: dict[str, list[torch.Tensor]] = {}
    windows = [w for w in torch.tensor(tokenizer(text)["input_ids"]).split(200) if len(w) > 1]
    with observe_routing(model, lambda view, _, groups: seen.setdefault(view.name, []).append(groups[0])):
        for window in windows:
            logits(model, window[None])
    for layer in report.layers:
        shares = torch.cat(seen[layer.name]).float().mean(dim=0)
        assert [group.share for group in layer.groups] == pytest.approx(shares.tolist(), abs=1e-4)
        assert layer.pairs and layer.loss is not None and 0 < (layer.silent or 0) < 1 and 0 < layer.far < 1
        read_most = layer.most_read(1, named=False)[0]
        assert len(layer.groups[read_most].examples) == 5 or layer.groups[read_most].name == "mixed"
    markdown = report.to_markdown()
    assert all(escape(layer.title) in markdown for layer in report.layers)
    ordered = report.that_matter(2)
    assert len(ordered) == 2 and ordered[0].loss == max(
        layer.loss for layer in report.layers if layer.loss is not None
    )
    report.to_json(tmp_path / "groups.json")
    assert GroupReport.from_json(tmp_path / "groups.json") == report
    assert {path.name for path in save_plots(report, tmp_path)} == {
        f"head-{n}-{h}.png" for n in (0, 1) for h in (0, 1)
    }
    assert report.to_markdown(["figures/head-0-1.png"]).count("![") == 1


def test_of_many_heads_those_that_attend_furthest_are_told(parts: Any, tiny: Any, monkeypatch: Any) -> None:
    model, tokenizer = parts
    text = (tiny / "held_out.txt").read_text()[:3000]
    monkeypatch.setattr(interpret_run, "MOST_HEADS", 1)
    report = group_report(model, tokenizer, text, window=200)
    (only,) = report.layers
    assert report.heads_left_out == len(routers(model)) - 1
    assert "Of 4 heads the 1 that look for distant tokens most" in report.to_markdown()
    windows = [Window(w) for w in torch.tensor(tokenizer(text)["input_ids"]).split(200) if len(w) == 200][:4]
    found = what_is_read(model, windows)
    assert only.name == max(found, key=lambda name: found[name].looks_far)


def test_agreement_with_a_treebank_is_told_by_head_and_text_is_read_besides(
    parts: Any, tiny: Any, tmp_path: Any
) -> None:
    model, tokenizer = parts
    (tmp_path / "small.conllu").write_text(GOOD * 60)
    alone = group_report(model, tokenizer, tmp_path / "small.conllu", window=100)
    text = (tiny / "held_out.txt").read_text()[:1500]
    both = group_report(model, tokenizer, tmp_path / "small.conllu", texts=[text], window=100)
    assert both.text["words"] == alone.text["words"]
    assert both.text["tokens"] == alone.text["tokens"] + len(tokenizer(text)["input_ids"])
    for one, two in zip(alone.layers, both.layers, strict=True):
        assert 0 <= one.agreement["upos"]["groups"]["nmi"] <= 1
        assert one.agreement["upos"]["groups"] == two.agreement["upos"]["groups"]
    assert "a look-up by token" in both.to_markdown()


@pytest.mark.parametrize("family", [*FAMILIES, "shared"])
def test_what_is_read_is_what_the_weights_say(family: str) -> None:
    """Against weights made pair by pair in float64 from the same queries, keys and decisions."""
    model = focus_model("llama") if family == "shared" else cells(family)
    ids = token_ids(batch=1, length=LENGTH)
    found = what_is_read(model, [Window(ids[0])])
    calls: list[Seen] = []
    members: dict[str, torch.Tensor] = {}
    reads: dict[str, torch.Tensor] = {}

    def note(router: Any, _: Any, memberships: torch.Tensor) -> None:
        members[router.name] = memberships[0]
        reads[router.name] = memberships[0][..., None] if family == "shared" else router.reads[0]

    with observe_attention(model, calls.append), observe_routing(model, note):
        logits(model, ids)
    names = []
    for call in calls:
        per = call.query.shape[1] // call.key.shape[1]
        for head in [None] if family == "shared" else range(call.key.shape[1]):
            name = call.layer.name if head is None else f"{call.layer.name}.{head}"
            names.append(name)
            queries = range(call.query.shape[1]) if head is None else range(head * per, (head + 1) * per)
            bands = 1 if family == "shared" else BANDS
            attention = torch.zeros(4, bands, dtype=torch.double)
            silent = 0
            for i in range(LENGTH):
                allowed = {}
                for j in range(i + 1):
                    group = int(members[name][j].int().argmax())
                    band = min((i - j > 2 * WINDOW) + (i - j > 4 * WINDOW), bands - 1)
                    if i - j <= WINDOW or j < SINKS or bool(reads[name][i, group, band]):
                        allowed[j] = (i - j > WINDOW and j >= SINKS, group, band)
                silent += i > WINDOW + SINKS and not any(far for far, _, _ in allowed.values())
                places = list(allowed)
                for q in queries:
                    scores = (
                        call.query[0, q, i].double() @ call.key[0, q // per, places].double().T * call.scores.scale
                    )
                    if (cap := call.scores.softcap) is not None:
                        scores = cap * (scores / cap).tanh()
                    for weight, (far, group, band) in zip(scores.softmax(-1), allowed.values(), strict=True):
                        if far:
                            attention[group, band] += weight / len(queries)
            assert torch.allclose(torch.tensor(found[name].attention), attention, atol=1e-4)
            assert found[name].silent == silent and found[name].far == LENGTH - WINDOW - SINKS - 1
            assert found[name].tokens == LENGTH
            for pair in found[name].pairs:
                assert pair.query - pair.key > WINDOW and pair.group == int(members[name][pair.key].int().argmax())
    assert set(names) == found.keys() and names


@pytest.mark.parametrize("routing", ["cells", "shared"])
def test_a_head_that_reads_nothing_is_missed_and_comes_back(routing: str) -> None:
    model = cells("llama") if routing == "cells" else focus_model("llama")
    ids = token_ids(batch=1, length=LENGTH)
    before = logits(model, ids)
    layer, head = focus_layers(model)[1], 0 if routing == "cells" else None
    name = layer.name if head is None else f"{layer.name}.{head}"
    with reading_nothing(layer, head):
        without, found = logits(model, ids), what_is_read(model, [Window(ids[0])])
    assert not torch.equal(without, before)
    if routing == "cells":
        assert found[name].silent == found[name].far
        assert all(one.silent < one.far for other, one in found.items() if other != name)
    assert torch.equal(logits(model, ids), before)
    (mean, error) = loss_without(model, [name], [Window(ids[0])])[name]
    losses = [torch.nn.functional.cross_entropy(one[0, :-1], ids[0, 1:]).item() for one in (before, without)]
    assert mean == pytest.approx(losses[1] - losses[0], abs=1e-4) and error > 0


def test_samples_and_balance_are_told_by_head() -> None:
    model, ids = cells("llama"), token_ids(batch=1)
    sample = take_sample(model, ids[0])
    assert list(sample.groups) == list(sample.reads) and len(sample.groups) == 6
    assert any(sum(counts) for counts in sample.reads.values())
    assert same_groups(sample, take_sample(model, ids[0])) == 1
    for layer in focus_layers(model)[:1]:
        layer.focus_centroids["default"].data.neg_()
    assert same_groups(sample, take_sample(model, ids[0])) < 0.9
    seen: dict[str, torch.Tensor] = {}
    with observe_routing(model, lambda view, _, groups: seen.update({view.name: groups[0].float().mean(0)})):
        logits(model, ids)
    assert largest_groups(model, [ids]) == {name: pytest.approx(s.max().item()) for name, s in seen.items()}


def test_of_a_heads_groups_those_of_different_names_come_first() -> None:
    groups = [GroupFacts(share=0.2, name=name) for name in ("names", "mixed", "names", "commas", "verbs")]
    layer = LayerFacts(name="x.0", groups=groups, contextual=0.0)
    layer.attention = [[0.3, 0.0], [0.9, 0.0], [0.1, 0.15], [0.2, 0.0], [0.0, 0.0]]
    assert layer.most_read(9) == [0, 3, 2] and layer.most_read(9, named=False) == [1, 0, 2, 3]


def test_groups_of_heads_are_not_balanced_after_fitting() -> None:
    with pytest.raises(ValueError, match="balanced when the adapter is fitted"):
        calibrate(cells("llama"), [token_ids()])


def test_two_adapters_are_compared_head_by_head(parts: Any, tiny: Any) -> None:
    model, tokenizer = parts
    other = adapted(tiny, seed=2)
    text = [(tiny / "held_out.txt").read_text()[:1500]]
    matched = match_adapters(model, other, tokenizer, text, window=100)
    assert [layer.name for layer in matched] == [name.removeprefix("base_model.model.") for name in routers(model)]
    assert all(m.overlap == 1 for layer in match_adapters(model, model, tokenizer, text, 100) for m in layer.matches)
