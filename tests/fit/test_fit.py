"""A whole fit: planted structure is found, and what comes out is an adapter like any other."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import focus_hf
from focus_hf.adapter import focus_layers
from focus_hf.cli import app, load_commands
from focus_hf.evaluate.perplexity import attended_share
from focus_hf.evaluate.sample import take_sample
from focus_hf.fit import FitRecipe, fit
from focus_hf.fit.assemble import cost_table
from focus_hf.fit.budget import choose, total_loss
from focus_hf.fit.capture import capture
from focus_hf.fit.costs import EVERYTHING, Cost, Option
from focus_hf.fit.layer import fit_layer, load_layer
from focus_hf.fit.store import LayerWindow
from focus_hf.fit.windows import spread_windows
from focus_hf.records import TokenSample, check_adapter, load_results, save_results
from focus_hf.records.sample import same_groups
from focus_hf.texts import Texts
from tests.families import token_ids

TOPICS, LENGTH, WIDTH = 8, 256, 24


def recipe(tiny, out, **changes):
    values = {
        "model": str(tiny / "base"),
        "train_file": [str(tiny / "train.txt")],
        "output_dir": str(out),
        "seq_len": 128,
        "windows": 4,
        "cost_windows": 2,
        "rows": 64,
        "num_groups": 4,
        "group_dim": 4,
        "local_window": 8,
        "sink_tokens": 2,
        "steps": 20,
        "pairs": [0.5],
    }
    return FitRecipe(**{**values, **changes})


@pytest.fixture(scope="module")
def fitted(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("fit") / "adapter"
    said = []
    result = fit(recipe(tiny, out, pairs=[0.5, 0.3], base_model="org/base"), say=said.append)
    return result, said


def copying_window(seed: int) -> LayerWindow:
    """Two heads. The first copies: its queries attend to the keys of their own topic, wherever these are, and what is
    there matters. To the second one only the last few tokens matter."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    # The same for all windows: how a hidden state says of which topic a token is, and which one it looks for.
    fixed = torch.Generator().manual_seed(99)
    says, seeks = torch.randn(2, TOPICS, WIDTH, generator=fixed)
    topic, wanted = (torch.randperm(LENGTH, generator=generator) % TOPICS for _ in range(2))
    hidden = says[topic] + seeks[wanted] + 0.1 * normal(LENGTH, WIDTH)
    one_hot = torch.eye(TOPICS)
    keys = torch.stack([5 * one_hot[topic], 0.02 * normal(LENGTH, TOPICS)])
    queries = torch.stack([5 * one_hot[wanted], 0.02 * normal(LENGTH, TOPICS)])
    values = normal(2, LENGTH, 6)
    values[1] *= 0.01
    plain = torch.arange(LENGTH)
    return LayerWindow(hidden, keys, keys, values, plain, queries, queries, normal(2, LENGTH, 6), scale=0.5)


def test_a_head_that_copies_is_found_and_gets_the_pairs():
    settings = FitRecipe(
        model="m", output_dir="o", num_groups=TOPICS, group_dim=8, local_window=8, steps=200, seq_len=LENGTH
    )
    layer = fit_layer(copying_window, range(6), {LENGTH: range(10, 13)}, settings, seed=0)
    copying, local = layer.costs[LENGTH]
    groups, window = copying[Option(16, 1)], copying[Option(64)]
    assert groups.pairs < window.pairs < 0.5
    assert groups.loss < 0.05 * window.loss
    table = {"0.0": {**copying, EVERYTHING: Cost(0.0, 1.0)}, "0.1": {**local, EVERYTHING: Cost(0.0, 1.0)}}
    chosen = choose(table, 0.25)
    assert chosen["0.0"].top_k and not chosen["0.1"].top_k
    without = {head: {o: c for o, c in costs.items() if not o.top_k} for head, costs in table.items()}
    assert total_loss(table, chosen) < 0.2 * total_loss(without, choose(without, 0.25))


def test_costs_fall_with_what_is_attended(fitted):
    for table in fitted[0].tables.values():
        for costs in table.values():
            assert costs[EVERYTHING] == Cost(0.0, 1.0)
            windows = sorted((o for o in costs if o != EVERYTHING and not o.top_k), key=lambda o: o.local_window)
            assert [costs[o].pairs for o in windows] == sorted(costs[o].pairs for o in windows)
            for option, cost in costs.items():
                assert cost.loss >= 0 and 0 < cost.pairs <= 1
                if option.top_k > 1:
                    assert cost.pairs >= costs[Option(option.local_window, option.top_k - 1)].pairs


def test_the_budget_holds_in_the_adapter(fitted, tiny):
    """Counted by the adapter itself, on the windows of the fit and on others."""
    result, _ = fitted
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny / "base"), result.folder).eval()
    for budget in result.budgets:
        assert budget.pairs <= budget.wanted
        focus_hf.set_routing(model, pairs=budget.wanted)
        share = attended_share(model, token_ids(8, 128))
        assert share == pytest.approx(budget.pairs, abs=0.08)
    with_groups = [head for head, how in result.budgets[0].patterns.items() if how["attend"] == "groups"]
    assert with_groups == [] or any(layer.focus_proj for layer in focus_layers(model))


def test_every_stock_loader_gives_the_same_logits(fitted, tiny):
    folder, ids = fitted[0].folder, token_ids(2, 96)
    check_adapter(folder)
    base = AutoModelForCausalLM.from_pretrained(tiny / "base")
    loaded = AutoModelForCausalLM.from_pretrained(tiny / "base")
    loaded.load_adapter(str(folder))
    models = [
        loaded,
        AutoModelForCausalLM.from_pretrained(folder),
        AutoPeftModelForCausalLM.from_pretrained(folder),
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny / "base"), folder),
    ]
    with torch.no_grad():
        dense = base(ids).logits
        found = [model.eval()(ids).logits for model in models]
        shortest = min(layer.routing_config.local_window for layer in focus_layers(loaded))
        for model in models:
            assert torch.equal(model(ids[:, : shortest + 1]).logits, base(ids[:, : shortest + 1]).logits)
    assert all(torch.equal(one, found[0]) for one in found)
    assert (found[0] - dense).abs().max() > 1e-4


def test_saving_again_changes_nothing(fitted, tiny, tmp_path):
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny / "base"), fitted[0].folder)
    model.save_pretrained(tmp_path)
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (fitted[0].folder, tmp_path))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    configs = [json.loads((folder / "adapter_config.json").read_text()) for folder in (fitted[0].folder, tmp_path)]
    assert all(configs[0][name] == configs[1][name] for name in ("head_patterns", "budgets", "routing", "num_groups"))


def test_half_precision_halves_the_file_and_is_what_was_recorded(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(FitRecipe, "options", lambda self, length: [Option(16, 2)])
    alike = {"uniform": True, "pairs": [0.75]}
    whole, half = (
        fit(recipe(tiny, tmp_path / name, half=name == "half", **alike)).folder for name in ("whole", "half")
    )
    one, two = (load_file(folder / "adapter_model.safetensors") for folder in (whole, half))
    assert {tensor.dtype for tensor in two.values()} == {torch.float16}
    assert all(torch.equal(one[name].half(), two[name]) for name in one)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny / "base"), half).eval()
    sample = TokenSample.load(half)
    assert same_groups(sample, take_sample(model, torch.tensor(sample.ids))) == 1.0


def test_the_adapter_attends_as_its_costs_were_measured(tiny, tmp_path, monkeypatch):
    """Groups of the adapter are groups of the fit: with one budget for all, pairs agree on the same windows.

    But for the second layer, whose tokens have been through a sparse first one.
    """
    monkeypatch.setattr(FitRecipe, "options", lambda self, length: [Option(16, 2)])
    wanted = recipe(tiny, tmp_path / "a", uniform=True, pairs=[0.75], cost_windows=4, rows=128)
    result = fit(wanted)
    texts = [source.load() for source in wanted.sources()]
    tokenizer = AutoTokenizer.from_pretrained(tiny / "base")
    windows = torch.stack(spread_windows(texts, tokenizer, [128] * 8, seed=0)[4:])
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny / "base"), result.folder).eval()
    assert all(how == Option(16, 2).pattern() for how in result.budgets[0].patterns.values())
    assert attended_share(model, windows) == pytest.approx(result.budgets[0].pairs, abs=1e-2)


def test_fitted_layers_are_used_again(fitted, tiny, tmp_path, monkeypatch):
    result, said = fitted
    assert said == ["reading text"]
    out = tmp_path / "adapter"
    first = fit(recipe(tiny, out))
    (out / "fit" / "1.safetensors").write_bytes(b"cut short")
    with pytest.raises(ValueError, match="already holds an adapter"):
        fit(recipe(tiny, out))
    said = []
    again = fit(recipe(tiny, out, resume=True, pairs=[0.5, 0.3], scratch_gb=1e-6), say=said.append)
    assert said == ["reading text", "1 of 2 layers are fitted already"]
    assert again.tables == first.tables and again.budgets[0] == first.budgets[0]
    monkeypatch.setattr("focus_hf.fit.run.capture", None)  # nothing is captured any more
    was = load_results(out).training["seconds"]
    save_results(replace(load_results(out), training={**load_results(out).training, "seconds": was + 1000}), out)
    fit(recipe(tiny, out, resume=True, pairs=[0.9]))
    assert load_results(out).training["seconds"] >= was + 1000  # what the layers took counts
    monkeypatch.undo()
    said.clear()
    fit(recipe(tiny, out, resume=True, steps=3), say=said.append)
    assert said[-1] == "0 of 2 layers are fitted already"


def test_passes_change_nothing(fitted, tiny, tmp_path):
    """Layers captured one by one, as where there is little room on disk, are those captured together."""
    together = fit(recipe(tiny, tmp_path / "a"))
    apart = fit(recipe(tiny, tmp_path / "b", scratch_gb=1e-9))
    for head, costs in together.tables[128].items():
        for option, cost in costs.items():
            assert apart.tables[128][head][option].loss == pytest.approx(cost.loss, rel=1e-3, abs=1e-9)


def test_without_groups_there_is_nothing_to_save_but_patterns(tiny, tmp_path):
    result = fit(recipe(tiny, tmp_path / "a", groups=False, pairs=[0.5]))
    assert {how["attend"] for how in result.budgets[0].patterns.values()} <= {"window", "everything"}
    assert load_file(result.folder / "adapter_model.safetensors") == {}
    model = AutoModelForCausalLM.from_pretrained(tiny / "base")
    model.load_adapter(str(result.folder))
    assert attended_share(model, token_ids(4, 128)) == pytest.approx(result.budgets[0].pairs, abs=1e-2)


def test_budgets_at_several_lengths(tiny, tmp_path):
    result = fit(recipe(tiny, tmp_path / "a", pairs=[0.5, 0.25], at=[128, 256]))
    assert [budget.length for budget in result.budgets] == [128, 256] and set(result.tables) == {128, 256}
    one, other = (result.tables[length]["0.0"][Option(16)].pairs for length in (128, 256))
    assert other < one
    facts = load_results(result.folder).training
    assert facts["pairs"] == "50% at 128 tokens, 25% at 256 tokens"
    assert facts["data"] == "train.txt" and facts["data revision"].startswith("sha256:")


def test_headroom_is_not_planned_with(fitted, tiny, tmp_path):
    out = shutil.copytree(fitted[0].folder, tmp_path / "a")
    result = fit(recipe(tiny, out, resume=True, pairs=[0.5, 0.4], headroom=0.2, base_model="org/base"))
    assert [budget.wanted for budget in result.budgets] == [0.5, 0.4]
    assert all(budget.pairs <= 0.8 * budget.wanted for budget in result.budgets)
    assert result.budgets[0].loss >= fitted[0].budgets[0].loss
    with pytest.raises(ValueError, match=r"pairs=0.3 less headroom=0.2: pairs=0.24 is too small"):
        fit(recipe(tiny, out, resume=True, pairs=[0.3], headroom=0.2, base_model="org/base"))
    assert load_results(out).training["headroom"] == "20%"


def test_recall_is_measured_beside_costs_and_counts_as_much_as_was_said(tiny, tmp_path, monkeypatch):
    """A fit that is gone on with measures what is missing, on the windows with copies alone, and is the same then."""
    once = fit(recipe(tiny, tmp_path / "once", pairs=[0.5, 0.4], recall=[0.0, 0.2]))
    out = tmp_path / "later"
    first = fit(recipe(tiny, out, pairs=[0.5, 0.4]))
    seen = []

    def counting(model, layers, windows, *args, **options):
        seen.append((sorted(windows), sorted(options["copied"])))
        capture(model, layers, windows, *args, **options)

    monkeypatch.setattr("focus_hf.fit.run.capture", counting)
    later = fit(recipe(tiny, out, pairs=[0.5, 0.4], recall=[0.0, 0.2], resume=True))
    assert seen == [([6, 7], [6, 7])]  # after four windows to fit to and two for costs
    assert [budget.patterns for budget in later.budgets] == [budget.patterns for budget in once.budgets]
    assert later.tables == first.tables  # what is drawn and told is the cost on ordinary text
    assert later.budgets[0] == first.budgets[0] and later.budgets[1].loss >= first.budgets[1].loss
    chosen = later.budgets[1]
    costs = [
        next(cost.loss for option, cost in later.tables[chosen.length][head].items() if option.pattern() == pattern)
        for head, pattern in chosen.patterns.items()
    ]
    assert chosen.loss == pytest.approx(sum(costs))
    assert load_results(out).training["recall"] == "0.00%, 20.00%"
    made_from = safe_open(out / "fit" / "0.safetensors", "pt").metadata()["made_from"]
    kept = {0: load_layer(out / "fit" / "0.safetensors", made_from)}
    plain, recall = cost_table(kept, 128)["0.0"], kept[0].recall[128][0]
    for option, cost in cost_table(kept, 128, recall=0.2)["0.0"].items():
        more = 0.0 if option == EVERYTHING else 0.2 * recall[option].loss
        assert cost == Cost(plain[option].loss + more, plain[option].pairs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recall": [1.5]}, "recall is a share of tokens, from 0 to 1; got 1.5"),
        ({"recall": [0.1, 0.1]}, "recall gives 2 shares for 1 budgets"),
        ({"pairs": [0.0]}, "above 0 and at most 1; got 0.0"),
        ({"headroom": 1}, "headroom is a share of a budget, at least 0 and below 1; got 1"),
        ({"pairs": [0.5, 0.5]}, "names one share twice"),
        ({"pairs": [0.5, 0.3], "at": [64, 64, 64]}, "3 lengths for 2 budgets"),
        ({"at": [16]}, "leaves next to nothing beyond local_window"),
        ({"windows": 0}, "windows must be an integer of at least 1"),
        ({"num_groups": 0}, "num_groups must be an integer from 1"),
        ({"train_file": []}, "Give either text files"),
        ({"seq_len": 1024}, "seq_len is 1024, but the model has 512 positions"),
        ({"windows": 5000}, "train.txt is too short for"),
        ({"pairs": [0.001]}, "pairs=0.001 is too small: the cheapest options take"),
    ],
)
def test_bad_input_is_told_in_one_line(tiny, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        fit(recipe(tiny, tmp_path / "a", **changes))


def test_windows_come_from_all_texts_alike_and_do_not_overlap():
    class Letters:
        def __call__(self, text, **_):
            return {"input_ids": [ord(letter) for letter in text]}

    texts = [Texts(["".join(chr(1000 * n + i) for i in range(900))], f"text {n}") for n in (1, 2)]
    windows = spread_windows(texts, Letters(), [100] * 5 + [200] * 2, seed=0)
    assert [len(window) for window in windows] == [100] * 5 + [200] * 2
    assert [int(window[0]) // 1000 for window in windows] == [1, 2, 1, 2, 1, 2, 1]
    every = torch.cat(windows)
    assert len(every.unique()) == len(every)


def test_the_command_and_train_with_pairs_are_the_same(tiny, tmp_path):
    load_commands([])
    flags = ["--model", tiny / "base", "--train-file", tiny / "train.txt", "--seq-len", 128]
    flags += ["--num-groups", 4, "--local-window", 8, "--seed", 1, "--json", "--pairs", 0.5]
    answers = []
    for name, more in (("fit", []), ("train", [])):
        out = tmp_path / name
        done = CliRunner().invoke(app, [name, *map(str, [*flags, *more, "--output-dir", out])])
        assert done.exit_code == 0, done.output
        answers.append((json.loads(done.stdout), load_file(out / "adapter_model.safetensors")))
    (fit_answer, fit_tensors), (train_answer, train_tensors) = answers
    assert fit_answer["budgets"] == train_answer["budgets"] and fit_answer["budgets"][0]["pairs"] <= 0.5
    assert all(torch.equal(fit_tensors[name], train_tensors[name]) for name in fit_tensors)
    done = CliRunner().invoke(app, ["train", *map(str, [*flags, "--max-steps", 3, "--output-dir", tmp_path / "c"])])
    assert "max_steps" in str(done.exception)
