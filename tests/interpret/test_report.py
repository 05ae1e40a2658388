"""`group_report` against counts made in another way, on hostile text, and through the command line."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import focus_hf
from focus_hf import FocusConfig, GroupReport, group_report
from focus_hf.adapter import focus_layers, observe_routing
from focus_hf.adapter.save import save_adapter
from focus_hf.interpret.figures import save_plots
from focus_hf.records import AdapterFileError
from tests.cli.test_cli import focus_hf as run
from tests.cli.test_cli import refusal
from tests.families import unbalance
from tests.interpret.test_parts import BAD, GOOD

HOSTILE = "<script>alert(1)</script> | `x` **b** {{ 7*7 }} \u202eevil\x07\u2028 &amp; ![i](http://e) $x$ ---\n" * 12


@pytest.fixture(scope="module")
def parts(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny / "base")
    tokenizer = AutoTokenizer.from_pretrained(tiny / "base")
    torch.manual_seed(1)
    model = get_peft_model(
        model, FocusConfig(num_groups=4, local_window=8, sink_tokens=2, task_type="CAUSAL_LM")
    ).eval()
    unbalance(model)
    return model, tokenizer


@pytest.fixture(scope="module")
def treebank(tmp_path_factory):
    """A hundred small sentences, two of them broken."""
    file = tmp_path_factory.mktemp("treebank") / "small.conllu"
    file.write_text(GOOD * 100 + BAD)
    return file


def memberships_of(model, ids):
    seen = {}

    def look(layer, scores, memberships):
        seen[layer.name] = memberships[0]

    with observe_routing(model, look), torch.no_grad():
        model(input_ids=ids[None], use_cache=False)
    return seen


def test_counts_are_those_of_the_model(parts, tiny):
    model, tokenizer = parts
    text = (tiny / "held_out.txt").read_text()[:6000]
    report = group_report(model, tokenizer, text, window=200)
    ids = torch.tensor(tokenizer(text)["input_ids"])
    windows = [window for window in ids.split(200) if len(window) > 1]
    assert report.text["tokens"] == sum(map(len, windows)) and len(report.layers) == 2
    for number, layer in enumerate(report.layers):
        groups = torch.cat([list(memberships_of(model, w).values())[number].int().argmax(-1) for w in windows])
        tokens = torch.cat(windows)
        for group, facts in enumerate(layer.groups):
            inside = tokens[groups == group]
            assert facts.share == pytest.approx(len(inside) / len(tokens), abs=1e-4)
            kinds, counts = inside.unique(return_counts=True)
            assert facts.top[0]["count"] == counts.max()
            for item in facts.lifted:
                assert item["lift"] > 1
        majority = sum(np.bincount(groups[tokens == kind]).max() for kind in tokens.unique())
        assert layer.strip == groups[: len(layer.strip)].tolist() and len(layer.strip) == len(report.strip) == 120
        assert layer.contextual == pytest.approx(1 - majority / len(tokens), abs=1e-6)


def test_lift_and_examples_are_of_the_text(parts):
    model, tokenizer = parts
    text = "the cat saw the dog, and the dog saw her. " * 40
    report = group_report(model, tokenizer, text, window=100)
    layer = report.layers[0]
    total = {}
    for facts in layer.groups:
        for item in facts.lifted:
            total.setdefault(item["token"], []).append(item["count"] * 1 / item["lift"] / facts.share)
    for occurrences in total.values():  # count / (lift * share) is how often the token occurs, whatever the group
        assert max(occurrences) - min(occurrences) < 0.05 * max(occurrences)
    shown = text.replace(" ", "")
    for facts in layer.groups:
        for example in facts.examples:
            joined = (example["before"] + example["token"] + example["after"]).replace(" ", "").replace("␣", "")
            assert joined in shown


def test_the_same_seed_gives_the_same_report(parts, tiny):
    model, tokenizer = parts
    text = (tiny / "held_out.txt").read_text()[:4000]
    one, again, other = (group_report(model, tokenizer, text, seed=seed).to_json() for seed in (3, 3, 4))
    assert one == again and one != other
    assert focus_layers(model)[0].mode is None and focus_layers(model)[0].observer is None


def test_a_treebank_gives_gold_labels_and_baselines(parts, treebank):
    model, tokenizer = parts
    report = group_report(model, tokenizer, treebank, window=64)
    assert report.text["words"] == 502 and report.text["skipped"] == 2 and report.text["name"] == "small.conllu"
    for layer in report.layers:
        found = layer.agreement["upos"]
        assert found["random"]["nmi"] < found["lookup"]["nmi"]
        assert all(0 <= found[way]["nmi"] <= 1 for way in found)
        for group in layer.groups:
            assert group.name in ("mixed", "empty") or group.covers >= 0.5 and group.covers >= 2 * group.chance
    # five kinds of words, each nearly always in the same group: layer 0 sees little but the token
    found = report.layers[0].agreement["upos"]
    assert found["groups"]["nmi"] > 10 * found["random"]["nmi"] and found["groups"]["ami"] > 0.1


def test_a_treebank_needs_offsets(parts, treebank):
    model, tokenizer = parts

    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match="Slow does not say where its tokens stand in the text"):
        group_report(model, Slow(), treebank)
    with pytest.raises(ValueError, match="fewer than two tokens"):
        group_report(model, tokenizer, "")


def test_text_shorter_than_the_window_is_read_all_the_same(parts):
    model, tokenizer = parts
    report = group_report(model, tokenizer, "to be")  # dense attention for every token
    assert report.text["tokens"] >= 2 and report.layers[0].pairs == []
    assert report.layers[0].reads == [] and report.layers[0].silent is report.layers[0].loss is None
    assert "on a text" in report.to_markdown() and report.that_matter() == []


def test_hostile_tokens_are_text_everywhere(parts, tmp_path):
    model, tokenizer = parts
    report = group_report(model, tokenizer, HOSTILE, name=HOSTILE)
    markdown = report.to_markdown()
    for forbidden in ("<script", "{{", "![i]", "\u202e", "\x07", "\u2028", "](http://e)"):
        assert forbidden not in markdown, forbidden
    tables = [line for line in markdown.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in tables} <= {5, 7}  # four cells or six, whatever is in them
    assert markdown.count("<details>") == markdown.count("</details>") == 3
    assert json.loads(report.to_json())["text"]["name"] == HOSTILE
    report.layers[0].groups[0].name = "$x$ <b>"
    for path in save_plots(report, tmp_path):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_report_comes_back_from_its_file(parts, treebank, tmp_path):
    model, tokenizer = parts
    report = group_report(model, tokenizer, treebank, window=64)
    report.to_json(tmp_path / "groups.json")
    assert GroupReport.from_json(tmp_path / "groups.json") == report
    values = json.loads((tmp_path / "groups.json").read_text())
    for change, message in (
        ({"schema": 9}, "schema 9, expected 3; upgrade"),
        ({"schema": 2}, "schema 2, expected 3; make it again"),
        ({"num_groups": 5}, "has 4 groups(.*), expected 5"),
        ({"surprise": 1}, "unknown entry 'surprise'"),
        ({"layers": [{"name": "x"}]}, "cannot be read|can be read"),
    ):
        (tmp_path / "bad.json").write_text(json.dumps({**values, **change}))
        with pytest.raises(ValueError, match=message):
            GroupReport.from_json(tmp_path / "bad.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match="is not a group report"):
        GroupReport.from_json(tmp_path / "bad.json")


@pytest.mark.slow
def test_a_report_of_640_groups_is_small(parts, tmp_path):
    """As of a 70B model: 80 layers with 8 groups."""
    _, tokenizer = parts
    treebank = tmp_path / "short.conllu"
    treebank.write_text(GOOD * 20)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=80,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    model = get_peft_model(LlamaForCausalLM(config), FocusConfig(local_window=8, task_type="CAUSAL_LM")).eval()
    report = group_report(model, tokenizer, treebank, window=256)
    assert len(report.layers) == 80
    assert len(report.to_json().encode()) < 1_000_000
    assert len(report.to_markdown().encode()) < 1_000_000


def test_groups_from_the_command_line(parts, tiny, treebank, tmp_path, capsys):
    model, _ = parts
    model.peft_config["default"].base_model_name_or_path = str(tiny / "base")
    adapter = save_adapter(model, tmp_path / "adapter")
    done = run("groups", "--adapter", adapter, "--treebank", treebank, "--seq-len", "64", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["text"]["skipped"] == 2
    assert "left out: small.conllu, line 1001: word 'Some'" in done.stderr
    out = [tmp_path / name for name in ("g.json", "g.md", "plots")]
    done = run(
        *("groups", "--adapter", adapter, "--text", tiny / "held_out.txt", "--seq-len", "64", "--write"),
        *("--json", out[0], "--markdown", out[1], "--plots", out[2]),
    )
    assert done.returncode == 0, done.stderr
    assert "Groups on held_out.txt" in done.stdout and "on held&#95;out.txt" in out[1].read_text()
    assert GroupReport.from_json(out[0]) == GroupReport.from_json(adapter / "focus_groups.json")
    assert sorted(path.name for path in (out[2] / "figures").iterdir()) == ["head-0.png", "head-1.png"]
    for arguments, message in (
        ([], "Give --text, --treebank or both"),
        (["--text", tiny / "held_out.txt", "--json", "-", "--markdown", "-"], "Only one of --json and --markdown"),
    ):
        assert message in refusal("groups", "--adapter", adapter, *arguments)


def test_missing_packages_are_named(treebank, monkeypatch):
    monkeypatch.setitem(sys.modules, "conllu", None)
    assert "This needs conllu: pip install 'focus-hf[interpret]'" in refusal(
        "groups", "--adapter", "x", "--treebank", treebank
    )


def test_the_public_names():
    assert focus_hf.group_report is group_report and focus_hf.GroupReport is GroupReport


def test_groups_of_two_adapters_are_matched(parts, tiny, tmp_path, capsys):
    """The second adapter is the first with its groups in another order, and one of them moved away."""
    model, _ = parts
    model.peft_config["default"].base_model_name_or_path = str(tiny / "base")
    save_adapter(model, tmp_path / "one")
    order = torch.tensor([2, 0, 3, 1])  # group ``order[i]`` of the first is group ``i`` of the second
    with torch.no_grad():
        for layer in focus_layers(model):
            for kind in (layer.focus_centroids, layer.focus_balance):
                kind["default"].copy_(kind["default"][order].clone())
        save_adapter(model, tmp_path / "two")
        back = torch.argsort(order)
        for layer in focus_layers(model):
            for kind in (layer.focus_centroids, layer.focus_balance):
                kind["default"].copy_(kind["default"][back].clone())
    text = ["--text", tiny / "held_out.txt", "--seq-len", "128"]
    done = run("groups", "--adapter", tmp_path / "one", "--against", tmp_path / "two", *text, "--json")
    assert done.returncode == 0, done.stderr
    for layer in json.loads(done.stdout)["layers"]:
        found = {m["group"]: m["other"] for m in layer["matches"] if m["overlap"] > 0}
        assert all(order[other] == group for group, other in found.items()) and len(found) >= 2
        assert all(m["overlap"] in (0.0, 1.0) for m in layer["matches"])
    done = run("groups", "--adapter", tmp_path / "one", "--against", tmp_path / "two", *text)
    assert "(1.00)" in done.stdout
    said = refusal("groups", "--adapter", tmp_path / "one", "--against", tmp_path / "two", *text, "--write")
    assert "--against compares two adapters on a --text" in said


def test_the_card_shows_the_report(parts, tiny, tmp_path):
    model, tokenizer = parts
    model.peft_config["default"].base_model_name_or_path = "org/base"
    folder = save_adapter(model, tmp_path / "adapter")
    report = group_report(model, tokenizer, HOSTILE, name=HOSTILE)
    report.to_json(folder / "focus_groups.json")
    card = focus_hf.FocusModelCard.from_adapter(folder, repo_id="me/focus").text
    assert "## What the groups mean" in card and report.to_markdown().strip() in card
    assert "<script" not in card and "\u202e" not in card
    files = focus_hf.push_to_hub(folder, "me/focus", dry_run=True)
    assert "focus_groups.json" in files.files
    broken = json.loads(report.to_json())
    del broken["text"]["tokens"]
    (folder / "focus_groups.json").write_text(json.dumps(broken))
    with pytest.raises(AdapterFileError, match="focus_groups.json cannot be shown"):
        focus_hf.FocusModelCard.from_adapter(folder, repo_id="me/focus")
